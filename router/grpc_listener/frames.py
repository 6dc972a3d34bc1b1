"""Finds the heads of HTTP/2 frames in a stream of bytes. Payloads are not read."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
"""Flags: END_STREAM of DATA and HEADERS, ACK of SETTINGS and PING, END_HEADERS of HEADERS and CONTINUATION."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of every client."""
HEAD_BYTES = 9
MOST_HEADER_BYTES = 64 << 10
"""Most bytes of the header fields of one call, compressed; as many as over HTTP. gRPC itself refuses 16 KiB and more,
but only after it has kept all of them."""
MOST_HEADER_FRAMES = 64
"""Most frames of the header fields of one call. Clients fill frames of 16 KiB."""
ENHANCE_YOUR_CALM = 11
"""HTTP/2's error for a client that makes too much work."""

STREAM: Final = 0x7FFFFFFF
"""Mask of a stream's bits. The bit above them is reserved and has no meaning."""

_HEAD: Final = struct.Struct(">IBI")
"""Length (three bytes) and kind, flags, stream."""

FrameHead = tuple[int, int, int, int, int]
"""A frame's index in its piece, the bytes of its payload, its kind, its flags, its stream."""


class FrameReader:
    """Finds the frames of one direction in pieces that may end anywhere."""

    __slots__ = ("skip", "whole")

    def __init__(self) -> None:
        self.skip = 0
        """Bytes of the last frame that are still to come."""
        self.whole = 0
        """Index in the last piece up to which it can be sent on. From there on it is read again with the next piece."""

    @property
    def is_between_frames(self) -> bool:
        return self.skip == 0

    def frames(self, piece: bytes) -> Iterator[FrameHead]:
        """Yields the heads in the next piece. Sets `skip` and `whole` after the last one."""
        at, end, unpack = self.skip, len(piece), _HEAD.unpack_from
        while at + HEAD_BYTES <= end:
            first, flags, stream = unpack(piece, at)
            length = first >> 8
            yield at, length, first & 255, flags, stream & STREAM
            at += HEAD_BYTES + length
        self.whole, self.skip = min(at, end), max(0, at - end)

    def stop_before(self, at: int) -> None:
        """Has the next piece begin with the frame at this index. Call it instead of taking further heads."""
        self.whole, self.skip = at, 0


class TooManyHeaders(Exception):
    """The header fields of a call are longer than they may be."""


def header_end(piece: bytes, at: int) -> int | None:
    """Returns the index where header fields end that begin with the frame at `at`. None: they are not complete.

    Raises TooManyHeaders.
    """
    begin = at
    for _ in range(MOST_HEADER_FRAMES):
        if at + HEAD_BYTES > len(piece):
            return None
        first, flags, _ = _HEAD.unpack_from(piece, at)
        at += HEAD_BYTES + (first >> 8)
        if at - begin > MOST_HEADER_BYTES:
            raise TooManyHeaders
        if at > len(piece):
            return None
        if flags & END_HEADERS:
            return at
    raise TooManyHeaders


def goaway(last_stream: int, error: int, text: bytes) -> bytes:
    """Returns a GOAWAY frame, which ends a connection."""
    payload = struct.pack(">II", last_stream, error) + text
    return struct.pack(">IBI", len(payload) << 8 | GOAWAY, 0, 0) + payload


def last_stream(piece: bytes, at: int) -> int:
    """Returns the last accepted stream of the GOAWAY at this index, or the highest of all if the piece ends before."""
    named = piece[at + HEAD_BYTES : at + HEAD_BYTES + 4]
    return int.from_bytes(named) & STREAM if len(named) == 4 else STREAM
