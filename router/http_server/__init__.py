"""An HTTP server in which no client can hold up another; it knows nothing of language models.

`server` accepts connections, and `fair_acceptor` shares them among routers. `protocol` parses one connection in small
pieces, within time limits. `exchange` is one request and its response. `loop_share` bounds the time that parsing takes
of the event loop. `lingering` ends a connection whose client may still be sending, and `reader_watch` one whose client
reads nothing.
"""
