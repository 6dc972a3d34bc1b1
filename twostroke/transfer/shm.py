"""Pages of a peer on the same host: the owner hands over its memfd, a pull is a copy between two mappings.

The owner listens on an abstract Unix socket, which leaves no file behind and can only be reached from the same host
(and network namespace). After the hello (`hello.py`) it passes the descriptor of its sealed, hence read-only, memory.
The connection then stays open and silent: its end tells each side that the other has gone.

Nothing of the owner runs during a pull, so a frozen owner delays nobody. A dead one is noticed when a pull starts,
which then fails. A pull that was copying while the owner died may end DONE: the dead write no more, and pages of the
announced generation were complete before they were announced. The thread that copies is the only one that writes
into local pages, so a pull that has ended is fenced.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from concurrent.futures import Future

import numpy as np

from twostroke.errors import ConfigError, InvalidRequest, PeerLost, ServeError
from twostroke.kv_cache.memory import PageMemory
from twostroke.transfer.base import Endpoint, Identity, Outcome, PageCopy, TransferResult
from twostroke.transfer.frames import Deadline
from twostroke.transfer.hello import Gate, Welcome, introduce
from twostroke.transfer.host import host_id
from twostroke.transfer.lane_transport import BACKLOG, LaneTransport
from twostroke.transfer.peers import LanePeer
from twostroke.transfer.pulls import Pull, Tally
from twostroke.transfer.threads import Lanes, Listener, hang_up, has_hung_up

_HELLO_S = 5.0
"""Within this time a new connection must have said who it is."""


class ShmTransport(LaneTransport["_ShmPeer", PageMemory]):
    """Reaches workers of the same host and network namespace."""

    name = "shm"

    def __init__(self) -> None:
        super().__init__(PageMemory)

    def reaches(self, endpoint: Endpoint) -> bool:
        return endpoint.transport == self.name and endpoint.host_id == host_id()

    async def listen(self, gate: Gate, memory: PageMemory) -> tuple[str, Listener]:
        address = f"twostroke-pages-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(_abstract(address))
        listening.listen(BACKLOG)
        return address, Listener("pages-shm", listening, lambda sock: _hand_over(sock, gate, memory))

    async def reach(self, endpoint: Endpoint, identity: Identity, memory: PageMemory, deadline_s: float) -> _ShmPeer:
        known = self._peers.find(endpoint)
        if known is not None and not known.is_gone:
            return known
        return await self._peers.reach(_ShmPeer(endpoint, identity, memory), deadline_s)


class _ShmPeer(LanePeer):
    """One life of one worker's pages: a silent connection, a read-only mapping and the thread that copies."""

    def __init__(self, endpoint: Endpoint, identity: Identity, memory: PageMemory) -> None:
        super().__init__(endpoint)
        self._identity = identity
        self._local = memory
        self._remote: PageMemory | None = None
        self._sock: socket.socket | None = None
        self._shut = False
        self._lanes = Lanes("pages-shm-pull", [self])

    @property
    def is_gone(self) -> bool:
        return self._sock is None or has_hung_up(self._sock)

    def start_hello(self, deadline: Deadline) -> Future[Welcome]:
        hello: Future[Welcome] = Future()
        self._lanes.submit(lambda peer: peer._reach(deadline), hello)
        return hello

    def start(self, copies: tuple[PageCopy, ...], deadline: Deadline) -> Pull:
        # Between two pages the copying thread looks at `unwanted` by itself: nobody has to wake it.
        pull = Pull(copies, deadline, interrupt=lambda _: None)
        self._lanes.submit(lambda peer: peer._copy(pull), pull.ended)
        return pull

    def end(self) -> None:
        self._shut = True
        if self._sock is not None:
            hang_up(self._sock)
        self._lanes.close()
        if self._sock is not None:
            self._sock.close()
        if self._remote is not None:
            self._remote.close()
        self._sock = self._remote = None

    def _reach(self, deadline: Deadline) -> Welcome:
        self._sock = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if self._shut:
                raise ConnectionAbortedError("the transport was closed")
            sock.settimeout(deadline.remaining_s())
            sock.connect(_abstract(self.endpoint.address))
            welcome = introduce(sock, self._identity, self.endpoint, deadline)
            self._remote = _take_over(sock, self.endpoint, deadline)
        except BaseException:
            self._sock = None
            sock.close()
            raise
        return welcome

    def _copy(self, pull: Pull) -> TransferResult:
        tally = Tally()
        try:
            self._refuse_if_gone()
            assert self._remote is not None
            for copy in pull.copies:
                if pull.unwanted or self._shut:
                    return tally.result(Outcome.FAILED, "the transport was closed" if self._shut else "fenced")
                if time.monotonic() >= pull.deadline.at:
                    return tally.result(Outcome.EXPIRED, "the deadline has passed")
                if changed := _copy_page(copy, self._remote, self._local):
                    return tally.result(Outcome.FAILED, changed)
                tally.copied_bytes += self._local.page_bytes
        except ServeError as error:
            return tally.result(Outcome.FAILED, error.message)
        return tally.result(Outcome.DONE)

    def _refuse_if_gone(self) -> None:
        if self.is_gone:
            raise PeerLost(f"shm {self.endpoint.address}: the peer has gone")


def _hand_over(sock: socket.socket, gate: Gate, memory: PageMemory) -> None:
    """The owner's end of one connection. Returns only by an exception, or when the reader is gone."""
    gate.admit(sock, Deadline.after(_HELLO_S))
    socket.send_fds(sock, [b"\0"], [memory.fd])
    sock.settimeout(None)
    if sock.recv(1):
        raise InvalidRequest("a reader spoke after its hello")


def _take_over(sock: socket.socket, endpoint: Endpoint, deadline: Deadline) -> PageMemory:
    sock.settimeout(deadline.remaining_s())
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise PeerLost(f"shm {endpoint.address}: the peer handed over no memory")
    try:
        return PageMemory.attach(descriptors[0], endpoint.pages, endpoint.page_bytes)
    except ConfigError:
        os.close(descriptors[0])
        raise


def _copy_page(copy: PageCopy, remote: PageMemory, local: PageMemory) -> str:
    """Why the copy is not the page that was asked for; empty if it is."""
    before = remote.generation(copy.remote)
    if before != copy.generation:
        return f"page {copy.remote} has generation {before}, generation {copy.generation} was asked for"
    np.copyto(local.page(copy.local), remote.page(copy.remote))
    after = remote.generation(copy.remote)
    if after != copy.generation:
        return f"page {copy.remote} was reused while it was copied: generation {after}, not {copy.generation}"
    return ""


def _abstract(address: str) -> str:
    return "\0" + address
