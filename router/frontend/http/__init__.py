"""The HTTP server: connections, requests, and the application with its endpoints.

`server` accepts connections. `protocol` parses one connection in small pieces, within time limits. `exchange` is one
request and its response. `app` holds the endpoints, behind the checks of `middleware`.
"""
