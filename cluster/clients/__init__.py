"""Programs and commands reach a cluster through this package: clients' endpoints, admin ports and the supervisor.

resuming           streams over HTTP or gRPC that go on at the next router when one dies
connect            HTTP and gRPC connections, with and without TLS
credentials        API key and TLS flags of clients
admin_access       the admin ports of routers, with the cluster's token
supervisor_access  the supervisor, through its launcher or on a Ray cluster
"""
