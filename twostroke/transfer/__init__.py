"""Page transports behind one small interface.

base       the interface                          registry  transports by name, the choice for one pair of workers
shm        same host: the peer's memfd            tcp       own sockets (tcp_owner, tcp_reader)
cuda_ipc   same host: the peer's GPU memory       nixl      RDMA where there is any (nixl_agent, nixl_owner)
fake       injects faults, for tests

Beneath them: lane_transport (what all but fake share), same_host and network (with connection, requests), listener and
hello (who may read), peers (one per life of a worker), pulls (deadline and fence), threads, frames, host.
"""
