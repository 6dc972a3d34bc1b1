"""The common part of transports between hosts: a listening socket, and peers of a few connections."""

from __future__ import annotations

import abc
import ipaddress
import math
import socket
from collections.abc import Sequence

from twostroke.base.errors import ConfigError
from twostroke.kv_cache.memory import Pages
from twostroke.transfer.base import Identity, PageEndpoint, shares_loopback
from twostroke.transfer.copy_thread_transport import BACKLOG, CopyThreadTransport
from twostroke.transfer.copy_threads import off_loop
from twostroke.transfer.network.connection import Connection, ConnectionPeer
from twostroke.transfer.sockets.handshake import ReaderValidator
from twostroke.transfer.sockets.listener import Listener
from twostroke.transfer.sockets.tls import PLAIN, SocketWrapper


class NetworkTransport(CopyThreadTransport[ConnectionPeer, Pages], abc.ABC):
    """Listens on `host`, which is also the address that peers get.

    Raises ConfigError where `host` is not an address that a peer could connect to.
    """

    def __init__(self, host: str, stall_s: float = math.inf, wrapper: SocketWrapper = PLAIN, port: int = 0) -> None:
        """`stall_s` is the time without progress after which a pull fails. `port` 0 means any."""
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"page transport {self.name}: peers cannot connect to {host!r}, give an interface's address",
                field="host",
            )
        super().__init__(Pages)  # type: ignore[type-abstract]  # never instantiated
        self._host = host
        self._stall_s = stall_s
        self.wrapper = wrapper
        self._port = port

    @abc.abstractmethod
    def serve(self, sock: socket.socket, memory: Pages) -> None:
        """Serves one admitted connection on a thread of its own. Ends only by raising."""

    @abc.abstractmethod
    def connections(self, endpoint: PageEndpoint, identity: Identity, memory: Pages) -> Sequence[Connection]:
        """Returns the reader's connections to one peer; they connect when they are used."""

    def reaches(self, endpoint: PageEndpoint) -> bool:
        if endpoint.transport != self.name:
            return False
        return shares_loopback(endpoint.host_id) or not _is_loopback(endpoint.address)

    async def listen(self, validator: ReaderValidator, memory: Pages) -> tuple[str, Listener]:
        listening = await off_loop(self._listen)
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{host}:{listening.getsockname()[1]}"
        listener = Listener(
            f"pages-{self.name}", listening, validator, lambda sock: self.serve(sock, memory), self.wrapper
        )
        return address, listener

    async def reach(
        self, endpoint: PageEndpoint, identity: Identity, memory: Pages, deadline_s: float
    ) -> ConnectionPeer:
        known = self._peers.find(endpoint)
        if known is not None and known.is_busy:  # a handshake would wait behind its pulls
            return known
        peer = known or ConnectionPeer(endpoint, self.connections(endpoint, identity, memory), self._stall_s)
        return await self._peers.reach(peer, deadline_s)

    def _listen(self) -> socket.socket:
        try:
            family, _, _, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"page transport {self.name} cannot listen on {self._host!r} port {self._port or 'any'}: {error}",
                field="host",
            ) from error


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
