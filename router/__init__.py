"""Life of a request on the router.

RECEIVED  the front door (HTTP or gRPC) has it as text or token ids; it is checked and becomes token ids
NAMED     its blocks have names, computed once for all choices and attempts
HELD      nobody has time for it: it waits for its turn, by class, tenant and limit, or is refused as too late
ROUTED    the policy has priced the pairs of decode worker and page source and chosen one; the choice is reserved
OPENED    the decode worker has it in its queue
FLOWING   tokens come over the worker's shared stream, in order, and go to the client as text
          worker lost: back to ROUTED with the tokens sent so far, one attempt later
          stream broken: attached again at the next position
DONE      the worker said its last word, or was told that no more is wanted: stop string, cancel, deadline

The doors are `http_app` (with `openai_schema`, `openai_http`, `openai_reply`) and `grpc_service`. Behind both is
`front`, which hands token ids to `dispatch` and makes text of what comes back (`text`, `detokenize`, `chat_template`);
`generation` is the interface between these two halves.

`waiting_room` is where requests are held; who goes when is decided by `admission` (with `turns`, `headroom`, `ghosts`
and `fairness`), which is pure.

`dispatch` owns open requests, `answer` one choice, `placement` one attempt, `worker_link` the connection to one decode
worker; `account` keeps what an answer was promised beside what it got, `request_log` writes that down. `fleet` knows
who is alive, `prefix_index` who holds what, `policies` choose.
"""
