"""Page transports behind one small interface.

base      the interface                 registry  transports by name, the choice for one pair of workers
shm       same host: the peer's memfd   tcp       own sockets (tcp_owner, tcp_reader)
fake      injects faults, for tests

Beneath shm and tcp: lane_transport (what they share), hello (who may read), peers (one per life of a worker), pulls
(deadline and fence), threads, frames, host.
"""
