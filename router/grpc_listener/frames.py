"""Frames of HTTP/2 as they pass: their heads are read, and what they carry is not."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
"""Flags: of DATA and HEADERS, of SETTINGS and PING, and of HEADERS and CONTINUATION."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What every client says first."""
HEAD_BYTES = 9
MOST_HEADER_BYTES = 64 << 10
"""Bytes of the header fields of one call, as they travel; as many as over HTTP. gRPC itself refuses calls with 16 KiB,
and keeps all that comes until then."""
MOST_HEADER_FRAMES = 64
"""Most frames of the header fields of one call. Clients fill frames of 16 KiB."""
ENHANCE_YOUR_CALM = 11
"""HTTP/2's error for a client that makes too much work."""

STREAM: Final = 0x7FFFFFFF
"""The bits of a stream; the one above them is reserved and means nothing."""

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
            yield at, length, first & 255, flags, stream & STREAM
            at += HEAD_BYTES + length
        self.whole, self.skip = min(at, end), max(0, at - end)

    def stop_before(self, at: int) -> None:
        """Says that the frame at this place was not taken: it begins the next piece."""
        self.whole, self.skip = at, 0


class TooManyHeaders(Exception):
    """The header fields of a call do not end where they should."""


def header_end(piece: bytes, at: int) -> int | None:
    """Returns where the header fields end that begin with the frame at this place. None: some are still to come.

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
    """Returns the frame that ends a connection."""
    payload = struct.pack(">II", last_stream, error) + text
    return struct.pack(">IBI", len(payload) << 8 | GOAWAY, 0, 0) + payload


def last_stream(piece: bytes, at: int) -> int:
    """Returns the last stream that is taken up, by the GOAWAY at this place; any, where the piece ends before that."""
    named = piece[at + HEAD_BYTES : at + HEAD_BYTES + 4]
    return int.from_bytes(named) & STREAM if len(named) == 4 else STREAM
