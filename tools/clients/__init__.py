"""Clients of a server, for commands and programs: they need packages that no server needs.

resuming  streams over HTTP or gRPC that continue at the next router when one dies
connect   HTTP and gRPC connections, with and without TLS
"""
