"""The path of a request through the router.

RECEIVED   an endpoint has it; it is checked, and its text becomes token ids
HASHED     the hashes of its blocks are known, computed once for all choices and attempts
QUEUED     no worker has time for it: it waits by class, tenant and limit, or is refused as too late
ROUTED     the policy has priced the pairs of decode worker and page source and reserved the cheapest
OPENED     the decode worker has it in its queue
STREAMING  tokens come over the worker's shared stream, in order, and go to the client as text
           worker lost: back to ROUTED with the tokens sent so far, one attempt later
           stream broken: attached again at the next position
DONE       the worker sent the finish reason, or was told to stop: stop string, cancel, deadline

Each package owns a part of this, and imports only packages below it (import-linter checks that):

endpoints     what HTTP and gRPC clients call: each reads a request, and writes its answer
http_server   the connections of HTTP clients; it knows nothing of language models
grpc_listener the gRPC port, in a process of its own: it slows down and cuts connections that cause useless work
preparation   the work on a request before admission: parse, check, render, tokenize
requests      what a client wants generated, and its answer from tokens to text
dialects      the APIs that clients use (OpenAI, KServe and others), one package each
auth          who a client is, and how much it may use
text          tokens and text: templates, tokenizers, stop strings, tool calls, structured output
serving       one request from its first placement to its last token, over as many workers as it takes
admission     which request goes now, which waits, which is refused
routing       who holds which blocks, what each placement would cost, which one is taken
fleet         which workers are alive, and the connections to them

`shared_memory` is memory that the routers of one launcher share.
`server` puts them together in one process. `admin` and `control_service` are for operators and other routers.
`branches` is the table of optional features, one folder each, and `server_branch` their interface.
"""
