"""The reader's end of TCP page connections: a peer is a few connections, each with a thread that alone uses it."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np

from twostroke.errors import PeerLost, ServeError, TransferFailed
from twostroke.kv_cache.memory import Pages
from twostroke.transfer.base import Endpoint, Identity, Outcome, PageCopy, TransferResult
from twostroke.transfer.frames import Deadline, check_fields, receive, receive_frame, receive_into, send_frame
from twostroke.transfer.hello import Welcome, introduce
from twostroke.transfer.peers import LanePeer
from twostroke.transfer.pulls import Pull, Tally
from twostroke.transfer.tcp_owner import CHANGED, KEPT, MAX_PAGES, batch_pages
from twostroke.transfer.threads import Lanes, hang_up, has_hung_up

CONNECTIONS = 2
"""Per peer, opened when used: a short pull need not wait for a long one."""
_REASON_LIMIT_BYTES = 4096


class TcpPeer(LanePeer):
    """One life of one worker's pages, reached over `CONNECTIONS` connections."""

    def __init__(self, endpoint: Endpoint, identity: Identity, memory: Pages) -> None:
        super().__init__(endpoint)
        self._connections = [_Connection(endpoint, identity, memory) for _ in range(CONNECTIONS)]
        self._lanes = Lanes("pages-tcp-pull", self._connections)

    @property
    def is_busy(self) -> bool:
        return any(connection.is_busy for connection in self._connections)

    def start_hello(self, deadline: Deadline) -> Future[Welcome]:
        hello: Future[Welcome] = Future()
        self._lanes.submit(lambda connection: connection.reach(deadline), hello)
        return hello

    def start(self, copies: tuple[PageCopy, ...], deadline: Deadline) -> Pull:
        pull = Pull(copies, deadline, self._interrupt)
        self._lanes.submit(lambda connection: connection.copy(pull), pull.ended)
        return pull

    def end(self) -> None:
        for connection in self._connections:
            connection.shut()
        self._lanes.close()
        for connection in self._connections:
            connection.forget()

    def _interrupt(self, pull: Pull) -> None:
        for connection in self._connections:
            connection.interrupt(pull)


class _Connection:
    """Only its thread sends, receives and closes; others may at most hang up, under the lock."""

    def __init__(self, endpoint: Endpoint, identity: Identity, memory: Pages) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._size = memory.page_bytes
        self._window = memory.window(batch_pages(memory.page_bytes))
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._welcome: Welcome | None = None
        self._pull: Pull | None = None
        self._shut = False

    @property
    def is_busy(self) -> bool:
        return self._pull is not None

    def reach(self, deadline: Deadline) -> Welcome:
        """Say hello unless that was done and the peer is still there. Raises a refusal, OSError or EOFError."""
        self._connected(deadline)
        assert self._welcome is not None
        return self._welcome

    def copy(self, pull: Pull) -> TransferResult:
        tally = Tally()
        with self._lock:
            self._pull = pull
        try:
            for start in range(0, len(pull.copies), MAX_PAGES):
                self._copy_part(pull.copies[start : start + MAX_PAGES], pull, tally)
            self._window.settle()
            return tally.result(Outcome.DONE)
        except TransferFailed as error:
            return tally.result(Outcome.FAILED, error.message)
        except TimeoutError as error:
            self.drop()
            return tally.result(Outcome.EXPIRED, f"tcp {self._endpoint.address}: {error}")
        except (OSError, EOFError, ServeError) as error:
            self.drop()
            return tally.result(Outcome.FAILED, f"tcp {self._endpoint.address}: {error}")
        finally:
            self._window.settle()
            with self._lock:
                self._pull = None

    def interrupt(self, pull: Pull) -> None:
        with self._lock:
            if self._pull is pull and self._sock is not None:
                hang_up(self._sock)

    def shut(self) -> None:
        """For good: what is being copied and whatever is queued fails."""
        with self._lock:
            self._shut = True
            if self._sock is not None:
                hang_up(self._sock)

    def drop(self) -> None:
        with self._lock:
            if self._sock is not None:
                self._sock.close()
            self._sock = None

    def forget(self) -> None:
        """After the thread has ended: keep neither the socket nor the pool's memory alive."""
        self.drop()
        self._window.close()

    def _copy_part(self, copies: tuple[PageCopy, ...], pull: Pull, tally: Tally) -> None:
        deadline = pull.deadline
        sock = self._connected(deadline)
        pages = np.array([copy.remote for copy in copies], "<u4").tobytes()
        generations = np.array([copy.generation for copy in copies], "<u8").tobytes()
        send_frame(sock, [deadline.remaining_s(), pages, generations], deadline)
        status = bytearray(receive(sock, 1, deadline))
        step = batch_pages(self._size)
        for start in range(0, len(copies), step):
            self._refuse_changed(sock, status, deadline)
            batch = copies[start : start + step]
            views = self._window.landing([copy.local for copy in batch])
            receive_into(sock, [*views, memoryview(status)], deadline)
            self._window.landed()
            tally.copied_bytes += len(batch) * self._size
        self._refuse_changed(sock, status, deadline)

    def _refuse_changed(self, sock: socket.socket, status: bytearray, deadline: Deadline) -> None:
        if status == KEPT:
            return
        if status != CHANGED:
            raise PeerLost(f"answers with status {bytes(status)!r}")
        fields = receive_frame(sock, _REASON_LIMIT_BYTES, deadline)
        check_fields(fields, (str,))
        raise TransferFailed(fields[0])

    def _connected(self, deadline: Deadline) -> socket.socket:
        """The connection, dialled again where the peer has hung up meanwhile."""
        if self._sock is not None and has_hung_up(self._sock):
            self.drop()
        if self._sock is not None:
            self._use(self._sock)
            return self._sock
        try:
            sock = self._dial(deadline)
            self._welcome = introduce(sock, self._identity, self._endpoint, deadline)
        except BaseException:
            self.drop()
            raise
        return sock

    def _dial(self, deadline: Deadline) -> socket.socket:
        failure: OSError = ConnectionError("the address leads nowhere")
        for family, kind, protocol, _, where in _resolve(self._endpoint.address):
            self.drop()
            sock = socket.socket(family, kind, protocol)
            self._use(sock)
            sock.settimeout(deadline.remaining_s())
            try:
                sock.connect(where)
            except TimeoutError:
                raise
            except OSError as error:
                failure = error
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
        raise failure

    def _use(self, sock: socket.socket) -> None:
        """From here on whoever hangs up reaches this socket; refused where somebody wanted to already."""
        with self._lock:
            self._sock = sock
            if self._shut:
                raise ConnectionAbortedError("the transport was closed")
            if self._pull is not None and self._pull.unwanted:
                raise ConnectionAbortedError("the pull was fenced")


def _resolve(address: str) -> list[Any]:
    host, _, port = address.rpartition(":")
    try:
        return socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except ValueError as error:  # a label that is too long, a null character
        raise ConnectionError(f"not an address: {error}") from error
