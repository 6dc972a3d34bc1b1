"""Bytes on a stream socket: deadlines, exact sends and receives, and small length-prefixed msgpack frames."""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from twostroke.base.errors import InvalidRequest

_LENGTH = struct.Struct("!I")
_MAX_VIEWS = 512
"""Buffers in one system call; Linux takes at most 1024."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """An instant on the monotonic clock."""

    at: float
    stall_s: float = math.inf
    """Longest time without progress, however much time is left."""

    @classmethod
    def after(cls, seconds: float, stall_s: float = math.inf) -> Deadline:
        return cls(time.monotonic() + seconds, stall_s)

    def remaining_s(self) -> float:
        """Returns seconds left. Raises TimeoutError where none are."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return left

    def wait_s(self) -> float:
        """Returns seconds that the next byte may take. Raises TimeoutError where no time is left."""
        return min(self.remaining_s(), self.stall_s)


def send(sock: socket.socket, buffers: Sequence[bytes | memoryview], deadline: Deadline) -> None:
    """Sends all of `buffers` without copying them. Raises TimeoutError or another OSError."""
    views = [memoryview(buffer) for buffer in buffers]
    first = 0
    while first < len(views):
        sock.settimeout(deadline.wait_s())
        first = _advance(views, first, sock.sendmsg(views[first : first + _MAX_VIEWS]))


def receive_into(sock: socket.socket, buffers: Sequence[memoryview], deadline: Deadline | None) -> None:
    """Fills all of `buffers`. Raises TimeoutError, EOFError where the peer hung up, or another OSError."""
    views = list(buffers)
    first = 0
    while first < len(views):
        sock.settimeout(None if deadline is None else deadline.wait_s())
        received = sock.recvmsg_into(views[first : first + _MAX_VIEWS])[0]
        if received == 0:
            raise EOFError("the peer closed the connection")
        first = _advance(views, first, received)


def receive(sock: socket.socket, length: int, deadline: Deadline | None) -> bytes:
    buffer = bytearray(length)
    if length:
        receive_into(sock, [memoryview(buffer)], deadline)
    return bytes(buffer)


def send_frame(sock: socket.socket, fields: Sequence[Any], deadline: Deadline) -> None:
    body = msgpack.packb(list(fields))
    send(sock, [_LENGTH.pack(len(body)) + body], deadline)


def receive_frame(sock: socket.socket, limit_bytes: int, deadline: Deadline | None) -> list[Any]:
    """Returns the fields of one frame. Raises InvalidRequest unless it is a list in at most `limit_bytes`."""
    (length,) = _LENGTH.unpack(receive(sock, _LENGTH.size, deadline))
    if not 0 < length <= limit_bytes:
        raise InvalidRequest(f"a frame of {length} bytes was announced, at most {limit_bytes} are read")
    body = receive(sock, length, deadline)
    try:
        fields = msgpack.unpackb(body)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise InvalidRequest(f"a frame is not msgpack: {error}") from error
    if not isinstance(fields, list):
        raise InvalidRequest(f"a frame holds a {type(fields).__name__}, not a list")
    return fields


def check_fields(fields: Sequence[Any], kinds: Sequence[type]) -> None:
    """Checks that `fields` have exactly these types. Raises InvalidRequest."""
    found = [type(value) for value in fields]
    if found != list(kinds):
        names = [[kind.__name__ for kind in row] for row in (found, kinds)]
        raise InvalidRequest(f"a frame holds {names[0][:16]}, expected {names[1]}")


def _advance(views: list[memoryview], first: int, moved: int) -> int:
    """Returns the index of the first view that is not used up after `moved` more bytes; cuts a partly used one."""
    while moved:
        size = len(views[first])
        if moved < size:
            views[first] = views[first][moved:]
            return first
        moved -= size
        first += 1
    return first
