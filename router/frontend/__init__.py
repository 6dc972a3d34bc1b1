"""A request between the client's bytes and token ids, and its answer on the way back.

A dialect (`openai`, `anthropic` or `kserve` over `http`, `kserve` or our own over `grpc`) reads it, and `auth` says
whose it is. `preparation` parses, checks, renders and tokenizes it; large bodies go to other processes. `structured`
compiles the grammar that its answer has to match. `request_handler` passes its prompts to the dispatcher and makes text
of the tokens that come back (`text`), which `output` takes apart into reasoning, tool calls and the rest. The dialect
writes each token to the client.
"""
