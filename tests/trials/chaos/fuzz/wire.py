"""A connection whose other end has said all that it will ever say: no thread, no system call."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, cast


class Wire:
    def __init__(self, said: bytes) -> None:
        self._left = memoryview(said)
        self.sent = bytearray()
        """Bytes that we have sent."""

    @property
    def sock(self) -> socket.socket:
        return cast(socket.socket, self)

    def settimeout(self, seconds: float | None) -> None:
        assert seconds is None or seconds > 0

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def setsockopt(self, *option: Any) -> None:
        """There is no network."""

    def recv(self, length: int, flags: int = 0) -> bytes:
        part = bytes(self._left[:length])
        if not flags & socket.MSG_PEEK:
            self._left = self._left[len(part) :]
        elif not part:
            raise BlockingIOError
        return part

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int, list[Any], int, None]:
        moved = 0
        for buffer in buffers:
            part = self._left[: len(buffer)]
            buffer[: len(part)] = part
            self._left = self._left[len(part) :]
            moved += len(part)
        return moved, [], 0, None

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        before = len(self.sent)
        for buffer in buffers:
            self.sent += buffer
        return len(self.sent) - before
