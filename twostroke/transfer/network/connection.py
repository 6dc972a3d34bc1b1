"""The reader's end of page connections over sockets: a peer has a few, each used by one thread only."""

from __future__ import annotations

import abc
import math
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from twostroke.base.errors import ServeError, TransferFailed
from twostroke.base.fault_points import Point, reach
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint, ReadOutcome, TransferResult
from twostroke.transfer.copy_threads import CopyThreads, hang_up, has_hung_up
from twostroke.transfer.peers import CopyThreadPeer
from twostroke.transfer.pulls import Pull, PullTally
from twostroke.transfer.sockets.frames import Deadline
from twostroke.transfer.sockets.handshake import Welcome, introduce
from twostroke.transfer.sockets.tls import PLAIN, SocketWrapper

MAX_PAGES = 4096
"""Pages of one request; longer pulls send several."""


class Connection(abc.ABC):
    """A connection to an owner. Only its thread sends, receives and closes; others may hang up, under the lock."""

    def __init__(self, endpoint: PageEndpoint, identity: Identity, wrapper: SocketWrapper = PLAIN) -> None:
        self._wrapper = wrapper
        self._endpoint = endpoint
        self._identity = identity
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._welcome: Welcome | None = None
        self._pull: Pull | None = None
        self._shut = False

    @abc.abstractmethod
    def enter(self, sock: socket.socket, deadline: Deadline) -> None:
        """Sends what this kind of connection needs after the handshake. Raises PeerLost, OSError or EOFError."""

    @abc.abstractmethod
    def copy_part(
        self, sock: socket.socket, copies: tuple[PageCopy, ...], deadline: Deadline, tally: PullTally
    ) -> None:
        """Copies these pages. Raises TransferFailed if it stays usable, and ServeError, OSError or EOFError if not."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Makes sure that no local page changes before the next `copy_part`.

        Called when nothing is being copied, or when the socket is closed.
        """

    @abc.abstractmethod
    def leave(self) -> None:
        """Cleans up after the socket was closed."""

    @abc.abstractmethod
    def release(self) -> None:
        """Releases the memory after the last copy."""

    @property
    def is_busy(self) -> bool:
        return self._pull is not None

    def handshake(self, deadline: Deadline) -> Welcome:
        """Performs the handshake unless connected already. Raises a refusal, OSError or EOFError."""
        self._connected(deadline)
        assert self._welcome is not None
        return self._welcome

    def copy(self, pull: Pull) -> TransferResult:
        tally = PullTally()
        where = f"{self._endpoint.transport} {self._endpoint.address}"
        with self._lock:
            self._pull = pull
        try:
            for start in range(0, len(pull.copies), MAX_PAGES):
                sock = self._connected(pull.deadline)
                reach(Point.TRANSPORT_ASKING)
                self.copy_part(sock, pull.copies[start : start + MAX_PAGES], pull.deadline, tally)
            self.synchronize()  # here an error still fails the pull
            return tally.result(ReadOutcome.DONE)
        except TransferFailed as error:
            return tally.result(ReadOutcome.FAILED, error.message)
        except TimeoutError as error:
            self.close_socket()
            return tally.result(ReadOutcome.EXPIRED, f"{where}: {error}")
        except (OSError, EOFError, ServeError) as error:
            self.close_socket()
            return tally.result(ReadOutcome.FAILED, f"{where}: {error}")
        finally:
            try:
                self.synchronize()  # after a failure, too: local pages must not change any more
            finally:
                with self._lock:
                    self._pull = None

    def interrupt(self, pull: Pull) -> None:
        with self._lock:
            if self._pull is pull and self._sock is not None:
                hang_up(self._sock)

    def shut(self) -> None:
        """Fails the running and all queued pulls, for good."""
        with self._lock:
            self._shut = True
            if self._sock is not None:
                hang_up(self._sock)

    def close_socket(self) -> None:
        """Closes the socket, if there is one, and cleans up after it. The next pull connects again."""
        with self._lock:
            if self._sock is not None:
                self._sock.close()
            self._sock = None
        self.leave()

    def forget(self) -> None:
        """Closes the socket and releases the pool's memory, after the thread has ended."""
        self.close_socket()
        self.release()

    def _connected(self, deadline: Deadline) -> socket.socket:
        """Returns the connection, dialled again if the peer has hung up."""
        if self._sock is not None and has_hung_up(self._sock):
            self.close_socket()
        if self._sock is not None:
            self._use(self._sock)
            return self._sock
        try:
            reach(Point.TRANSPORT_CONNECTING)
            sock = self._dial(deadline)
            self._welcome = introduce(sock, self._identity, self._endpoint, deadline)
            self.enter(sock, deadline)
        except BaseException:
            self.close_socket()
            raise
        return sock

    def _dial(self, deadline: Deadline) -> socket.socket:
        failure: OSError = ConnectionError("the address resolves to nothing")
        for family, kind, protocol, _, where in _resolve(self._endpoint.address):
            self.close_socket()
            sock = socket.socket(family, kind, protocol)
            self._use(sock)
            sock.settimeout(deadline.wait_s())
            try:
                sock.connect(where)
            except TimeoutError:
                raise
            except OSError as error:
                failure = error
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock = self._wrapper.dialled(sock)
                self._use(sock)
                self._wrapper.shake_hands(sock, deadline)
                return sock
        raise failure

    def _use(self, sock: socket.socket) -> None:
        """Registers the socket to hang up on. Raises ConnectionAbortedError if that was asked for already."""
        with self._lock:
            self._sock = sock
            if self._shut:
                raise ConnectionAbortedError("the transport was closed")
            if self._pull is not None and self._pull.unwanted:
                raise ConnectionAbortedError("the pull was fenced")


class ConnectionPeer(CopyThreadPeer):
    """One epoch of one worker's pages. More than one connection lets a short pull pass a long one.

    A pull without progress for `stall_s` fails, and with it the pulls queued behind it. So a stalled peer delays each
    queued pull by `stall_s` once, however many are before it.
    """

    def __init__(self, endpoint: PageEndpoint, connections: Sequence[Connection], stall_s: float) -> None:
        super().__init__(endpoint)
        self._connections = connections
        self._stall_s = stall_s
        self._stalled_at = -math.inf
        self._threads = CopyThreads(f"pages-{endpoint.transport}-pull", connections)

    @property
    def is_busy(self) -> bool:
        return any(connection.is_busy for connection in self._connections)

    def start_handshake(self, deadline: Deadline) -> Future[Welcome]:
        handshake: Future[Welcome] = Future()
        self._threads.submit(lambda connection: connection.handshake(deadline), handshake)
        return handshake

    def start(self, copies: tuple[PageCopy, ...], deadline: Deadline) -> Pull:
        pull = Pull(copies, Deadline(deadline.at, self._stall_s), self._interrupt)
        queued_at = time.monotonic()
        self._threads.submit(lambda connection: self._copy(connection, pull, queued_at), pull.ended)
        return pull

    def end(self) -> None:
        for connection in self._connections:
            connection.shut()
        self._threads.close()
        for connection in self._connections:
            connection.forget()

    def _copy(self, connection: Connection, pull: Pull, queued_at: float) -> TransferResult:
        if queued_at < self._stalled_at:
            return PullTally().result(
                ReadOutcome.FAILED, f"{self.endpoint.address} made no progress while this pull waited"
            )
        result = connection.copy(pull)
        if result.outcome is ReadOutcome.EXPIRED and pull.deadline.at > time.monotonic():
            self._stalled_at = time.monotonic()
        return result

    def _interrupt(self, pull: Pull) -> None:
        for connection in self._connections:
            connection.interrupt(pull)


def _resolve(address: str) -> list[Any]:
    host, _, port = address.rpartition(":")
    try:
        return socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except ValueError as error:  # a label that is too long, a null character
        raise ConnectionError(f"not an address: {error}") from error
