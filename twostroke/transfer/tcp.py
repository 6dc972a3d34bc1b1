"""Pages over TCP: own sockets, straight from the owner's pool memory into the reader's.

After the hello (`hello.py`) a reader sends requests, one at a time:

    reader -> owner  [seconds left, page ids (u32 each), generations (u64 each)]
    owner -> reader  status, pages of a batch, status, pages of a batch, ..., status

A status byte of 0 says: every page sent so far kept its generation while it was sent, and those that follow have
theirs. A 1 ends the answer and a frame [reason] follows. Any other error is a closed connection. The thread that
copies is the only one that writes into local pages, so a pull that has ended is fenced.
"""

from __future__ import annotations

import ipaddress
import socket

from twostroke.errors import ConfigError
from twostroke.kv_cache.memory import Pages
from twostroke.transfer.base import Endpoint, Identity
from twostroke.transfer.hello import Gate
from twostroke.transfer.host import host_id
from twostroke.transfer.lane_transport import BACKLOG, LaneTransport
from twostroke.transfer.tcp_owner import serve_pages
from twostroke.transfer.tcp_reader import TcpPeer
from twostroke.transfer.threads import Listener, off_loop


class TcpTransport(LaneTransport[TcpPeer, Pages]):
    """Listens on `host`, which is also the address that peers are told.

    Raises ConfigError where `host` is no address that a peer could connect to.
    """

    name = "tcp"

    def __init__(self, host: str) -> None:
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(f"page transport tcp: peers cannot connect to {host!r}, give an interface's address")
        super().__init__(Pages)  # type: ignore[type-abstract]  # nobody makes one of it
        self._host = host

    def reaches(self, endpoint: Endpoint) -> bool:
        if endpoint.transport != self.name:
            return False
        return endpoint.host_id == host_id() or not _is_loopback(endpoint.address)

    async def listen(self, gate: Gate, memory: Pages) -> tuple[str, Listener]:
        listening = await off_loop(self._listen)
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{host}:{listening.getsockname()[1]}"
        return address, Listener("pages-tcp", listening, lambda sock: serve_pages(sock, gate, memory))

    async def reach(self, endpoint: Endpoint, identity: Identity, memory: Pages, deadline_s: float) -> TcpPeer:
        known = self._peers.find(endpoint)
        if known is not None and known.is_busy:
            return known
        return await self._peers.reach(known or TcpPeer(endpoint, identity, memory), deadline_s)

    def _listen(self) -> socket.socket:
        try:
            family, _, _, _, address = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"page transport tcp cannot listen on {self._host!r}: {error}", field="host") from error


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
