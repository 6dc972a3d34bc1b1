"""A request between the client's bytes and token ids, and its answer on the way back.

A dialect (`http` with `openai`, or `grpc`) reads it, and `auth` says whose it is. `preparation` parses, checks,
renders and tokenizes it; large bodies go to other processes. `request_handler` passes its prompts to the dispatcher
and makes text of the tokens that come back (`text`). The dialect writes each token to the client.
"""
