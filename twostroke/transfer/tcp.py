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
from collections import Counter
from collections.abc import Sequence

from twostroke.errors import ConfigError
from twostroke.kv_cache.memory import PageMemory
from twostroke.transfer.base import Endpoint, Identity, PageCopy, PageTransport, Peer, Transfer, TransferResult
from twostroke.transfer.frames import Deadline
from twostroke.transfer.hello import Gate
from twostroke.transfer.host import host_id
from twostroke.transfer.peers import PeerBook, refuse_other_layouts
from twostroke.transfer.pulls import Pull, check_copies, fence_off, wait_for
from twostroke.transfer.tcp_owner import serve_pages
from twostroke.transfer.tcp_reader import TcpPeer
from twostroke.transfer.threads import Listener, off_loop

_BACKLOG = 128


class TcpTransport(PageTransport):
    """Listens on `host`, which is also the address that peers are told.

    Raises ConfigError where `host` is no address that a peer could connect to.
    """

    name = "tcp"

    def __init__(self, host: str) -> None:
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(f"page transport tcp: peers cannot connect to {host!r}, give an interface's address")
        self.refused: Counter[str] = Counter()
        """Readers refused at the hello, by error class."""
        self._host = host
        self._peers: PeerBook[TcpPeer] = PeerBook()
        self._listener: Listener | None = None
        self._memory: PageMemory | None = None
        self._identity: Identity | None = None

    async def open(self, memory: PageMemory, identity: Identity) -> Endpoint:
        assert self._memory is None, "opened twice"
        listening = await off_loop(self._listen)
        self._memory, self._identity = memory, identity
        gate = Gate(identity, memory.pages, memory.page_bytes, self.refused)
        self._listener = Listener("pages-tcp", listening, lambda sock: serve_pages(sock, gate, memory))
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{host}:{listening.getsockname()[1]}"
        return Endpoint(
            self.name, address, host_id(), identity.epoch, identity.fingerprint, memory.pages, memory.page_bytes
        )

    def reaches(self, endpoint: Endpoint) -> bool:
        if endpoint.transport != self.name:
            return False
        return endpoint.host_id == host_id() or not _is_loopback(endpoint.address)

    async def connect(self, endpoint: Endpoint, deadline_s: float) -> Peer:
        assert self._memory is not None, "connect before open"
        assert self._identity is not None
        refuse_other_layouts(endpoint, self._identity, self._memory.page_bytes)
        known = self._peers.find(endpoint)
        if known is not None and known.is_busy:
            return known
        return await self._peers.reach(known or TcpPeer(endpoint, self._identity, self._memory), deadline_s)

    def pull(self, peer: Peer, copies: Sequence[PageCopy], deadline_s: float) -> Transfer:
        assert isinstance(peer, TcpPeer)
        assert self._memory is not None, "pull before open"
        check_copies(copies, peer.endpoint, self._memory)
        return peer.start(tuple(copies), Deadline.after(deadline_s))

    async def wait(self, transfer: Transfer) -> TransferResult:
        assert isinstance(transfer, Pull)
        return await wait_for(transfer)

    async def fence(self, transfer: Transfer) -> None:
        assert isinstance(transfer, Pull)
        await fence_off(transfer)

    async def close(self) -> None:
        await self._peers.close()
        if self._listener is not None:
            await off_loop(self._listener.close)
            self._listener = None

    def _listen(self) -> socket.socket:
        try:
            family, _, _, _, address = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"page transport tcp cannot listen on {self._host!r}: {error}", field="host") from error


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
