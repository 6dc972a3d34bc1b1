"""One client's connection, and the one to the router that belongs to it. Bytes pass unchanged.

    ARRIVING   the TLS handshake, then the preface; there is no connection to the router yet
    OPEN       bytes go both ways, until one side ends or the client has cost too much for too long
    CLOSED

It reads from one side only when the other has taken all that came before, so it keeps at most one piece for each
direction. It reads nothing from a client that does not read. If a client has no credit, what it sends waits until time
adds some. The router's answers still go to that client, so its open calls suffer little.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Protocol

from router.grpc_listener.client_names import socket_path
from router.grpc_listener.connection_cost import CREDIT_PER_S, HEADERS_WITHOUT_END, ConnectionCost
from router.grpc_listener.frames import (
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    PREFACE,
    FrameReader,
    TooManyHeaders,
    goaway,
    header_end,
    last_stream,
)

PIECE_BYTES = 64 << 10
"""Bytes that are read at once."""
READ, WRITE = 1, 2
"""Events that a socket is watched for, with the values of `selectors`."""


class ConnectionStage(enum.Enum):
    ARRIVING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class Owner(Protocol):
    """What a connection needs from the loop that has all connections."""

    backend: str
    """Path of the router's Unix socket."""

    def watch(self, sock: socket.socket, events: int, call: Callable[[int], None]) -> None:
        """Calls `call` whenever one of these events happens; with no events, stops watching the socket."""

    def try_begin_call(self, connection: ClientConnection, stream: int) -> bool:
        """Counts a call and returns True if it may be passed on now. If not, `resume` is called when it is its turn."""

    def call_ended(self, connection: ClientConnection, stream: int) -> None: ...

    def pace(self, connection: ClientConnection) -> None:
        """Has `resume` called when time has added credit."""

    def now_s(self) -> float: ...

    def cut(self, connection: ClientConnection, why: str) -> None:
        """Takes the client's socket over, and closes it a little later."""

    def failed_to_dial(self, error: OSError) -> None: ...

    def closed(self, connection: ClientConnection) -> None: ...


class ClientConnection:
    __slots__ = (
        "_down",
        "_events",
        "_frames_down",
        "_frames_up",
        "_is_ending",
        "_owner",
        "_rest_down",
        "_rest_up",
        "_router",
        "_up",
        "_waiting",
        "client",
        "cost",
        "headers_since_s",
        "idle_since_s",
        "is_paced",
        "paced_since_s",
        "stage",
        "stuck_since_s",
    )

    def __init__(self, owner: Owner, client: socket.socket) -> None:
        self._owner = owner
        self.client = client
        self._router: socket.socket | None = None
        self.stage = ConnectionStage.ARRIVING
        self.cost = ConnectionCost(owner.now_s())
        self.idle_since_s = owner.now_s()
        """When it last had an open call, or else when it was accepted, in seconds."""
        self._frames_up, self._frames_down = FrameReader(), FrameReader()
        self._rest_up = self._rest_down = b""
        """Beginnings of frames' heads, which the next piece continues."""
        self._up = self._down = b""
        """Bytes that the router (`_up`) and the client (`_down`) have not taken yet."""
        self._waiting: bytes | None = None
        """Bytes that begin with a call that waits for its turn, or with a frame that waits for credit."""
        self.is_paced = False
        """Whether `_waiting` waits for credit, and not for a turn."""
        self.paced_since_s: float | None = None
        """When it began to wait for credit, in seconds. None: it has had a second's worth of credit since."""
        self.headers_since_s: float | None = None
        """Time since which header fields wait that are not complete."""
        self.stuck_since_s: float | None = None
        """Time since which the client has taken nothing of what waits for it. None: nothing waits."""
        self._is_ending = False
        """Whether the router has ended it: it closes when the client has taken the rest."""
        self._events = [0, 0]
        self._update()

    @property
    def has_calls(self) -> bool:
        return (self._waiting is not None and not self.is_paced) or self.cost.has_calls

    @property
    def next_stream(self) -> int:
        """The stream of the call that waits for its turn."""
        assert self._waiting is not None
        return next(iter(FrameReader().frames(self._waiting)))[4]

    @property
    def is_tls(self) -> bool:
        return isinstance(self.client, ssl.SSLSocket)

    @property
    def is_left(self) -> bool:
        """Whether the router has ended its side, even if not all of its bytes were read yet."""
        return self._is_ending or (self._router is not None and has_hung_up(self._router))

    def stuck_s(self) -> float:
        """Returns for how many seconds the client has taken nothing of what waits for it."""
        return 0.0 if self.stuck_since_s is None else self._owner.now_s() - self.stuck_since_s

    def close(self) -> None:
        if self.stage is not ConnectionStage.CLOSED:
            self._leave()
            if self.stuck_since_s is not None:  # else the kernel would keep the rest, and try for minutes to send it
                with contextlib.suppress(OSError):
                    self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.client.close()
            self._owner.closed(self)

    def resume(self) -> None:
        """Passes on the call that waited for its turn, or the frame that waited for credit, and what came after it."""
        waited, self._waiting = self._waiting, None
        is_granted, self.is_paced = not self.is_paced, False
        if waited is None or self.stage is not ConnectionStage.OPEN:
            return
        self._take_up(waited, is_granted)
        if self.is_tls and self.stage is ConnectionStage.OPEN:
            self._on_client(READ)  # TLS may have bytes for which the socket causes no event
        self._update()

    # The client's side

    def _on_client(self, events: int) -> None:
        if self.stage is ConnectionStage.CLOSED:  # by another event of the same select
            return
        if isinstance(self.client, ssl.SSLSocket) and self.client.version() is None and not self._shake_hands():
            return
        if events & WRITE and self._down:
            self._send_down(b"")
        while self._reads_client():
            piece = _received(self.client)
            if piece is None:
                break
            if not piece:
                self.close()
                return
            self._arrive(piece) if self.stage is ConnectionStage.ARRIVING else self._take_up(self._rest_up + piece)
            if not (isinstance(self.client, ssl.SSLSocket) and self.client.pending()):
                break
        self._update()

    def _shake_hands(self) -> bool:
        assert isinstance(self.client, ssl.SSLSocket)
        try:
            self.client.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self._owner.watch(self.client, WRITE, self._on_client)
            self._events[0] = WRITE
            return False
        except OSError:
            self.close()
            return False
        self._update()
        return True

    def _reads_client(self) -> bool:
        return self.stage is not ConnectionStage.CLOSED and not (
            self._up or self._down or self._waiting or self._is_ending
        )

    def _arrive(self, piece: bytes) -> None:
        begun = self._rest_up + piece
        if not PREFACE.startswith(begun[: len(PREFACE)]):
            self.close()
        elif len(begun) < len(PREFACE):
            self._rest_up = begun
        elif self._dial():
            self._rest_up = b""
            self.stage = ConnectionStage.OPEN
            self._send_up(PREFACE)
            self._take_up(begun[len(PREFACE) :])

    def _dial(self) -> bool:
        try:
            host, port = self.client.getpeername()[:2]
            self._router = _dialled(self._owner.backend, host, port)
        except OSError as error:
            self._owner.failed_to_dial(error)
            self.close()
            return False
        return True

    def _take_up(self, piece: bytes, is_granted: bool = False) -> None:
        """Passes on the frames that may pass. `is_granted`: the first one begins a call whose turn it is."""
        reader, cost = self._frames_up, self.cost
        if cost.credit(self._owner.now_s()) >= CREDIT_PER_S:
            self.paced_since_s = None
        headers_since_s, self.headers_since_s = self.headers_since_s, None
        for at, length, kind, flags, stream in reader.frames(piece):
            if kind == HEADERS and stream % 2 == 0:  # clients open odd streams; gRPC ignores others (RFC 9113, 5.1.1)
                self.close()
                return
            if cost.is_spent:
                reader.stop_before(at)
                self._pace(piece[at:])
                break
            if kind == HEADERS:
                try:
                    is_whole = header_end(piece, at) is not None
                except TooManyHeaders:
                    self.cut(HEADERS_WITHOUT_END)
                    return
                if not is_whole:
                    cost.came_in_part()
                    self.headers_since_s = headers_since_s or self._owner.now_s()
                    reader.stop_before(at)
                    break
                begins = cost.begins_call(stream) and not is_granted
                if begins and not self._owner.try_begin_call(self, stream):
                    reader.stop_before(at)
                    self._waiting = piece[at:]
                    break
                is_granted = False
            cost.came(length, kind, flags, stream)
        self._rest_up = b"" if self._waiting else piece[reader.whole :]
        self._send_up(piece[: reader.whole])
        self._note_idle()

    def _pace(self, piece: bytes) -> None:
        """Keeps a piece for which the connection has no credit, until time has added some."""
        self._waiting, self.is_paced = piece, True
        if self.paced_since_s is None:
            self.paced_since_s = self._owner.now_s()
        self._owner.pace(self)

    def _send_up(self, piece: bytes) -> None:
        if self._router is None:
            return
        left = _sent(self._router, self._up + piece)
        if left is None:
            self.close()
        else:
            self._up = left

    # The router's side

    def _on_router(self, events: int) -> None:
        if events & WRITE and self._up:
            self._send_up(b"")
        if events & READ and not self._down and self._router is not None:
            piece = _received(self._router)
            if piece == b"":
                self._is_ending = True
                if not self._down:
                    self.close()
                    return
            elif piece is not None:
                self._take_down(self._rest_down + piece)
        self._update()

    def _take_down(self, piece: bytes) -> None:
        reader, cost = self._frames_down, self.cost
        for at, length, kind, flags, stream in reader.frames(piece):
            if kind == GOAWAY:
                cost.most_stream = last_stream(piece, at)
            if cost.sent(length, kind, flags, stream):
                self._owner.call_ended(self, stream)
        self._rest_down = piece[reader.whole :]
        self._send_down(piece[: reader.whole])
        self._note_idle()

    def _send_down(self, piece: bytes) -> None:
        waiting = self._down + piece
        left = _sent(self.client, waiting)
        if left is None or (self._is_ending and not left):
            self.close()
            return
        if not left:
            self.stuck_since_s = None
        elif self.stuck_since_s is None or len(left) < len(waiting):
            self.stuck_since_s = self._owner.now_s()
        self._down = left

    # Both

    def _note_idle(self) -> None:
        if self.has_calls:
            self.idle_since_s = self._owner.now_s()

    def cut(self, why: str) -> None:
        """Sends GOAWAY with the reason, unless a frame to the client is incomplete. Its socket goes to the owner."""
        if self._frames_down.is_between_frames and not self._down:
            text = f"this connection costs too much for what its calls are worth: {why}"
            _sent(self.client, goaway(self.cost.last_stream, ENHANCE_YOUR_CALM, text.encode()))
        self._leave()
        self._owner.cut(self, why)

    def _leave(self) -> None:
        self.stage = ConnectionStage.CLOSED
        self._owner.watch(self.client, 0, self._on_client)
        if self._router is not None:
            self._owner.watch(self._router, 0, self._on_router)
            self._router.close()
            self._router = None
        self._waiting = None
        self.is_paced = False

    def _update(self) -> None:
        """Watches each side for what can be done next."""
        if self.stage is ConnectionStage.CLOSED:
            return
        wanted = (READ if self._reads_client() else 0) | (WRITE if self._down else 0)
        if wanted != self._events[0]:
            self._events[0] = wanted
            self._owner.watch(self.client, wanted, self._on_client)
        if self._router is not None:
            wanted = (0 if self._down or self._is_ending else READ) | (WRITE if self._up else 0)
            if wanted != self._events[1]:
                self._events[1] = wanted
                self._owner.watch(self._router, wanted, self._on_router)


def _dialled(backend: str, host: str, port: int) -> socket.socket:
    """Connects to the router, from a path that names the client. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = socket_path(backend, host, port)
    try:
        sock.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock.bind(path)
        try:
            sock.connect(backend)
        finally:
            os.unlink(path)
    except OSError:
        sock.close()
        raise
    return sock


def has_hung_up(sock: socket.socket) -> bool:
    """Returns whether the other side has ended the connection, even if not all of its bytes were read yet."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _received(sock: socket.socket) -> bytes | None:
    """Returns the next piece, b"" when the connection has ended or failed, or None when no bytes have come yet."""
    try:
        return sock.recv(PIECE_BYTES)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return None
    except OSError:
        return b""


def _sent(sock: socket.socket, piece: bytes) -> bytes | None:
    """Sends what can be sent now. Returns what is left, or None when the connection has failed."""
    if not piece:
        return b""
    try:
        return piece[sock.send(piece) :]
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return piece
    except OSError:
        return None
