"""What clients call: HTTP endpoints here, and the gRPC service in a package of its own.

`app` is the table of routes, behind the checks of `middleware`. `answer` writes one answer, whole or as a stream, in
the dialect of its request. `models`, `openapi` and `health_pages` are pages about the server.
"""
