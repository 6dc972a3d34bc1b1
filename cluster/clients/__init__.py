"""Commands reach a running server through this package: the admin ports of its routers, and its supervisor.

state_file         where a server on this machine listens, as its launcher has written it
control_socket     the Unix socket of a launcher
admin_access       the admin ports of routers, with the cluster's token
supervisor_access  the supervisor, through its launcher or on a Ray cluster
"""
