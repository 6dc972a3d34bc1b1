"""The path of a request through the router.

RECEIVED   an endpoint has it as text or token ids; it is checked and becomes token ids
HASHED     the hashes of its blocks are known, computed once for all choices and attempts
QUEUED     no worker has time for it: it waits by class, tenant and limit, or is refused as too late
ROUTED     the policy has priced the pairs of decode worker and page source and reserved the cheapest
OPENED     the decode worker has it in its queue
STREAMING  tokens come over the worker's shared stream, in order, and go to the client as text
           worker lost: back to ROUTED with the tokens sent so far, one attempt later
           stream broken: attached again at the next position
DONE       the worker sent the finish reason, or was told to stop: stop string, cancel, deadline

Each package owns a part of this, and imports only those below it (an import contract holds this):

endpoints     what HTTP and gRPC clients call: each reads a request, and writes its answer
http_server   the connections of HTTP clients; it knows nothing of language models
grpc_listener the gRPC port, in a process of its own: it cuts connections that only cost
preparation   what a request costs before it is admitted: parse, check, render, tokenize
requests      what a client wants generated, and its answer from tokens to text
dialects      the forms in which clients ask and are answered, one package each
auth          who a client is, and how much it may use
text          tokens and text: templates, tokenizers, stop strings, tool calls, structured output
serving       one request from its first placement to its last token, over as many workers as it takes
admission     which request goes now, which waits, which is refused
routing       who holds which blocks, what each placement would cost, which one is taken
fleet         which workers are alive, and the connections to them

`shared_memory` is what routers of one launcher have besides their ports.
`server` puts them together in one process. `admin` and `control_service` are for operators and other routers.
`branches` is the table of the router's branches, a folder each, and `server_branch` says what they may give.
"""
