"""Frames of HTTP/2 as they pass: their heads are read, and what they carry is not."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, ACK = 1, 1
"""Flags: of DATA and HEADERS, and of SETTINGS and PING."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What every client says first."""
HEAD_BYTES = 9
ENHANCE_YOUR_CALM = 11
"""HTTP/2's error for a client that makes too much work."""

_HEAD: Final = struct.Struct(">IBI")
"""Length (three bytes) and kind, flags, stream."""

FrameHead = tuple[int, int, int, int, int]
"""The place at which a frame begins, the bytes after its head, its kind, its flags, its stream."""


class FrameReader:
    """Finds the frames of one direction, in whatever pieces they come."""

    __slots__ = ("skip", "whole")

    def __init__(self) -> None:
        self.skip = 0
        """Bytes of the last frame that are still to come."""
        self.whole = 0
        """The end of the last piece, without the half of a head, which has to be read again with the next one."""

    @property
    def is_between_frames(self) -> bool:
        return self.skip == 0

    def frames(self, piece: bytes) -> Iterator[FrameHead]:
        """Yields the heads in the next piece. `skip` and `whole` are right when all were taken."""
        at, end, unpack = self.skip, len(piece), _HEAD.unpack_from
        while at + HEAD_BYTES <= end:
            first, flags, stream = unpack(piece, at)
            length = first >> 8
            yield at, length, first & 255, flags, stream
            at += HEAD_BYTES + length
        self.whole, self.skip = min(at, end), max(0, at - end)

    def stop_before(self, at: int) -> None:
        """Says that the frame at this place was not taken: it begins the next piece."""
        self.whole, self.skip = at, 0


def goaway(last_stream: int, error: int, text: bytes) -> bytes:
    """Returns the frame that ends a connection."""
    payload = struct.pack(">II", last_stream, error) + text
    return struct.pack(">IBI", len(payload) << 8 | GOAWAY, 0, 0) + payload
