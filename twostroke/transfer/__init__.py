"""Page transports behind one small interface.

base                   the interface: open, connect, pull, wait, fence
registry               transports by name, and the choice for one pair of workers
copy_thread_transport  what all transports share: listener, peers, pulls and their fence
peers                  one connection per epoch of a worker        pulls  one pull: deadline and fence
copy_threads           threads that copy                           sockets/  frames, handshake, TLS, listener
same_host/             shm (the peer's memfd), cuda_ipc (the peer's GPU memory)
network/               tcp (own sockets), nixl (RDMA where the hosts have it)
"""
