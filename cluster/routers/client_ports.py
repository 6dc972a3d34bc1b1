"""The ports for clients, which all routers of a launcher share, and the memory in which they count together.

HTTP is one listening socket that every router's processes inherit. All of them accept from its one queue, so a client
that connects while a router dies is served by another one. For gRPC, a router that is alone inherits a socket as well.
Several routers each listen by themselves (`SO_REUSEPORT`), so that the kernel spreads the few long connections over
them, and the launcher only holds the port.
"""

from __future__ import annotations

import os
import socket

from router.addresses import bind_listener, hold_port
from router.shared_memory import create_router_memory
from twostroke.config import ListenConfig, RouterConfig


class ClientPorts:
    def __init__(self, listen: ListenConfig, routers: int) -> None:
        self._listen = listen
        self._is_alone = routers == 1
        self._http: socket.socket | None = None
        self._grpc: socket.socket | None = None
        self._memory: int | None = None

    def open(self) -> None:
        """Takes both ports, once. Raises ConfigError where one is in use."""
        if self._http is not None:
            return
        host = self._listen.host
        self._http = bind_listener(host, self._listen.http_port)
        try:
            take = bind_listener if self._is_alone else hold_port
            self._grpc = take(host, self._listen.grpc_port, "--grpc-port")
            self._memory = create_router_memory()
        except BaseException:
            self.close()
            raise
        self._listen = self._listen.replace(
            http_port=self._http.getsockname()[1], grpc_port=self._grpc.getsockname()[1]
        )

    def given_to(self, config: RouterConfig) -> RouterConfig:
        """Returns the config of a process that shares them. They must be open."""
        assert self._http is not None, "given_to() before open()"
        assert self._grpc is not None
        grpc_fd = self._grpc.fileno() if self._is_alone else None
        return config.replace(listen=self._listen, http_fd=self._http.fileno(), grpc_fd=grpc_fd, shared_fd=self._memory)

    def close(self) -> None:
        """Gives the ports back as soon as no router has them any more."""
        for each in (self._http, self._grpc):
            if each is not None:
                each.close()
        if self._memory is not None:
            os.close(self._memory)
        self._http = self._grpc = self._memory = None
