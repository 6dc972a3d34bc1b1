"""An HTTP server in which no client can hold up another; it knows nothing of language models.

`server` accepts connections. `protocol` parses one connection in small pieces, within time limits. `exchange` is one
request and its response. `loop_share` bounds what one connection takes of the
event loop. `lingering` ends a connection whose client may still be writing.
"""
