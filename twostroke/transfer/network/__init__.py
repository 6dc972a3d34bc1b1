"""Transports between hosts: tcp over own sockets, nixl over RDMA."""
