"""Page transports behind one small interface.

base  the interface        shm   same host: the peer's memfd, mapped
tcp   own sockets          fake  injects faults, for tests
"""
