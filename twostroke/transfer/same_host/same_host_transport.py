"""This is the common part of transports within one host: a Unix socket, and one copy thread per peer.

The owner listens on a Unix socket in a folder that only its user may enter. Each side asks the kernel which user owns
the other process before it sends anything, and closes the connection of another user. After the handshake the owner
hands over access to its pages. The connection then stays open and silent: its end tells each side that the other is
gone.

The owner runs no code during a pull, so a frozen owner delays no reader. A dead one is noticed when a pull starts,
which then fails. A pull during which the owner died may end DONE, because announced pages were complete. The copy
thread is the only writer of local pages, so a pull that has ended is fenced.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from twostroke.base.errors import InvalidRequest, PeerLost, ServeError, TransferFailed, Unauthenticated
from twostroke.base.fault_points import Point, reach
from twostroke.security.trusted_paths import private_folder, remove_abandoned_sockets
from twostroke.transfer.base import SOCKETS, Identity, PageCopy, PageEndpoint, ReadOutcome, TransferResult, host_id
from twostroke.transfer.copy_thread_transport import BACKLOG, AnyPages, CopyThreadTransport
from twostroke.transfer.copy_threads import CopyThreads, hang_up, has_hung_up
from twostroke.transfer.peers import CopyThreadPeer
from twostroke.transfer.pulls import Pull, PullTally
from twostroke.transfer.sockets.frames import Deadline
from twostroke.transfer.sockets.handshake import ReaderValidator, Welcome, introduce
from twostroke.transfer.sockets.listener import Listener
from twostroke.transfer.sockets.tls import PlainWrapper


class SameHostPeer(CopyThreadPeer, abc.ABC):
    """The pages of one worker's epoch as a reader sees them."""

    pages_per_copy: int
    """Pages that are copied at once; a pull can be ended between two copies."""

    def __init__(self, endpoint: PageEndpoint, identity: Identity) -> None:
        super().__init__(endpoint)
        self._identity = identity
        self._sock: socket.socket | None = None
        self._threads = CopyThreads(f"pages-{endpoint.transport}-pull", [self])

    @abc.abstractmethod
    def receive_memory(self, sock: socket.socket, deadline: Deadline) -> None:
        """Receives the owner's memory. Raises ServeError, OSError or EOFError."""

    @abc.abstractmethod
    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies up to `pages_per_copy` pages. Raises TransferFailed where one is not the page that was asked for."""

    @abc.abstractmethod
    def release(self) -> None:
        """Releases the owner's memory, if it was received."""

    @property
    def is_gone(self) -> bool:
        return self._sock is None or has_hung_up(self._sock)

    def start_handshake(self, deadline: Deadline) -> Future[Welcome]:
        handshake: Future[Welcome] = Future()
        self._threads.submit(lambda peer: peer._reach(deadline), handshake)
        return handshake

    def start(self, copies: tuple[PageCopy, ...], deadline: Deadline) -> Pull:
        # The copy thread checks `unwanted` between two copies, so it needs no interrupt.
        pull = Pull(copies, deadline, interrupt=lambda _: None)
        self._threads.submit(lambda peer: peer._copy_all(pull), pull.ended)
        return pull

    def end(self) -> None:
        if self._sock is not None:
            hang_up(self._sock)
        self._threads.close()
        if self._sock is not None:
            self._sock.close()
        self._sock = None
        self.release()

    def _reach(self, deadline: Deadline) -> Welcome:
        self._sock = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if self._is_closed:
                raise ConnectionAbortedError("the transport was closed")
            reach(Point.TRANSPORT_CONNECTING)
            sock.settimeout(deadline.remaining_s())
            sock.connect(str(private_folder(SOCKETS) / socket_name(self.endpoint)))
            check_same_user(sock)
            welcome = introduce(sock, self._identity, self.endpoint, deadline)
            sock.settimeout(deadline.remaining_s())
            self.receive_memory(sock, deadline)
        except BaseException:
            self._sock = None
            sock.close()
            raise
        return welcome

    def _copy_all(self, pull: Pull) -> TransferResult:
        tally = PullTally()
        try:
            if self.is_gone:
                raise PeerLost(f"{self.endpoint.transport} {self.endpoint.address}: the peer has gone")
            for start in range(0, len(pull.copies), self.pages_per_copy):
                if pull.unwanted or self._is_closed:
                    return tally.result(ReadOutcome.FAILED, "the transport was closed" if self._is_closed else "fenced")
                if time.monotonic() >= pull.deadline.at:
                    return tally.result(ReadOutcome.EXPIRED, "the deadline has passed")
                reach(Point.TRANSPORT_ASKING)
                copies = pull.copies[start : start + self.pages_per_copy]
                self.copy(copies)
                tally.copied_bytes += self.endpoint.layout.bytes_of([copy.remote for copy in copies])
        except ServeError as error:
            return tally.result(ReadOutcome.FAILED, error.message)
        return tally.result(ReadOutcome.DONE)


AnySameHostPeer = TypeVar("AnySameHostPeer", bound=SameHostPeer)


class SameHostTransport(CopyThreadTransport[AnySameHostPeer, AnyPages], abc.ABC):
    """Reaches workers of the same host and network namespace."""

    @abc.abstractmethod
    def hand_over(self, sock: socket.socket, memory: AnyPages) -> None:
        """Sends an admitted reader what it needs to open the pages."""

    @abc.abstractmethod
    def peer(self, endpoint: PageEndpoint, identity: Identity, memory: AnyPages) -> AnySameHostPeer: ...

    def reaches(self, endpoint: PageEndpoint) -> bool:
        return endpoint.transport == self.name and endpoint.host_id == host_id()

    def address(self, name: str, memory: AnyPages) -> str:
        """Returns the address for peers: the socket's name, and after a space what the transport adds."""
        return name

    async def listen(self, validator: ReaderValidator, memory: AnyPages) -> tuple[str, Listener]:
        path, listening = await asyncio.to_thread(listen_in, private_folder(SOCKETS), BACKLOG)
        wrapper = SameUserWrapper()
        serve = functools.partial(self._serve, memory=memory)
        listener = Listener(f"pages-{self.name}", listening, validator, serve, wrapper, path)
        return self.address(path.name, memory), listener

    async def reach(
        self, endpoint: PageEndpoint, identity: Identity, memory: AnyPages, deadline_s: float
    ) -> AnySameHostPeer:
        known = self._peers.find(endpoint)
        if known is not None and not known.is_gone:
            return known
        return await self._peers.reach(self.peer(endpoint, identity, memory), deadline_s)

    def _serve(self, sock: socket.socket, memory: AnyPages) -> None:
        """Serves one connection as the owner, until the reader is gone."""
        self.hand_over(sock, memory)
        sock.settimeout(None)
        if sock.recv(1):
            raise InvalidRequest("a reader sent data after its handshake")


def socket_name(endpoint: PageEndpoint) -> str:
    return endpoint.address.partition(" ")[0]


def receive_descriptor(sock: socket.socket, endpoint: PageEndpoint) -> int:
    """Receives the one descriptor that the owner sends. Raises PeerLost if none comes."""
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise PeerLost(f"{endpoint.transport} {endpoint.address}: the peer handed over no memory")
    return descriptors[0]


def refuse_changed(copy: PageCopy, generation: int, *, after: bool = False) -> None:
    """Refuses a page whose generation is not the one that was asked for. Raises TransferFailed."""
    if generation == copy.generation:
        return
    if after:
        raise TransferFailed(
            f"page {copy.remote} was reused while it was copied: generation {generation}, not {copy.generation}"
        )
    raise TransferFailed(f"page {copy.remote} has generation {generation}, not {copy.generation}")


SUFFIX = ".sock"
_CREDENTIALS = struct.Struct("3i")
"""Linux' `struct ucred`: process, user and group."""


def check_same_user(sock: socket.socket) -> None:
    """Refuses a peer unless the process that made the other end is this user's or root's. Raises Unauthenticated."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user not in (os.geteuid(), 0):
        raise Unauthenticated(f"the process at the other end belongs to user {user}, not to {os.geteuid()} or root")


class SameUserWrapper(PlainWrapper):
    """Does not wrap connections, but refuses those of other users before anything is read."""

    def shake_hands(self, sock: socket.socket, deadline: Deadline) -> None:
        check_same_user(sock)


def listen_in(folder: Path, backlog: int) -> tuple[Path, socket.socket]:
    """Listens on a new Unix socket in `folder`. Those without a listener are removed.

    A socket gets its name when it listens. So the process of a socket that refuses connections has ended.
    """
    remove_abandoned_sockets(folder, SUFFIX)
    name = secrets.token_hex(16)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unfinished = folder / f".{name}"
    listening.bind(str(unfinished))
    listening.listen(backlog)
    path = folder / f"{name}{SUFFIX}"
    unfinished.rename(path)
    return path, listening
