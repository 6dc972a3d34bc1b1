"""What happened to one request, and when: one trace over all processes that had a part in it.

request                     router: received to last token sent; child of the client's own span, where it names one
├── prepare                 router: template, tokens, checks
└── answer                  router: one choice, over as many workers as it takes; resumptions, moves, retries are events
    ├── route               router: waiting for a turn, choosing (with the decision's breakdown), opening
    ├── wait                router: opened to first token
    └── attempt             decode worker: opened to ended
        ├── queue           waiting for pages; once more after each preemption
        ├── pull            pages from the page source or a peer: how many, bytes, over which transport
        │   └── prefill     prefill worker: asked to last block computed
        │       ├── queue
        │       ├── pull    from a peer
        │       └── chunk   prompt tokens of one step
        ├── chunk           prompt tokens that the decode worker computes itself
        └── decode          first token to last: tokens, steps, preemptions

Every process keeps the spans of its latest requests (`twostroke trace REQUEST` asks for them), and counts their lengths
by name. If a collector is configured, it sends the spans of sampled traces there.
"""
