"""What a connection costs for each of its useful calls. Costs are in units of the work that one small frame makes."""

from __future__ import annotations

from router.grpc_listener.frames import (
    ACK,
    DATA,
    END_STREAM,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
)

FIRST_CREDIT = 2048
"""Credit of a new connection: 64 calls that are reset, 256 that are refused, or 2,048 frames that answer nothing."""
MOST_CREDIT = 160_000
"""Credit that a connection may save: for giving up all of its 4,096 streams at once."""
CREDIT_PER_S = 80
"""Given for time, however little is asked: for pings, and for ten refusals a second."""
RESET_COST = 32
"""What a call costs that the client resets before anything was answered: the router has begun to serve it."""
REFUSAL_COST = 8
"""What a call costs that the router refuses."""
CALL_CREDIT = 512
"""What a call gives that ends with an answer: it pays for sixteen that are reset."""
SMALL_BYTES = 16
"""A frame of DATA with fewer bytes costs what it costs without any."""
BYTES_PER_CREDIT = 8
"""Bytes of an answer that give one unit: a window of one byte lets a byte through, which pays for nothing."""
MOST_DATA_CREDIT = 4
"""What one frame of an answer gives at most: clients open their windows for it, and measure with a ping."""
FRAMES, HEADERS_WITHOUT_END = "frames", "headers"
REASONS = (FRAMES, HEADERS_WITHOUT_END)
"""For which a connection is cut."""


class ConnectionCost:
    """The credit of one connection, and its open calls."""

    __slots__ = ("_at_s", "_credit", "_is_answered", "last_stream", "useful_calls")

    def __init__(self, now_s: float) -> None:
        self._credit: float = FIRST_CREDIT
        self._at_s = now_s
        self._is_answered: dict[int, bool] = {}
        """Open calls by their streams, and whether something was answered."""
        self.last_stream = 0
        """The highest that the client has opened."""
        self.useful_calls = 0

    @property
    def has_calls(self) -> bool:
        return bool(self._is_answered)

    def came(self, length: int, kind: int, flags: int, stream: int) -> None:
        """Counts a frame of the client."""
        if kind == DATA:
            if length < SMALL_BYTES and not flags & END_STREAM:
                self._credit -= 1
        elif kind == HEADERS and stream > self.last_stream:
            self.last_stream = stream
            self._is_answered[stream] = False
        elif kind == RST_STREAM:
            self._credit -= 1 if self._is_answered.pop(stream, True) else RESET_COST
        else:
            self._credit -= 1

    def sent(self, length: int, kind: int, flags: int, stream: int) -> bool:
        """Counts a frame of the router. Returns whether it ends a call."""
        if kind == DATA:
            self._credit += min(MOST_DATA_CREDIT, length / BYTES_PER_CREDIT)
            if stream in self._is_answered:
                self._is_answered[stream] = True
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self._end(stream)
            return True
        elif kind in (PING, SETTINGS) and not flags & ACK:
            self._credit += 1
        return False

    def is_spent(self, now_s: float) -> bool:
        """Returns whether the connection must be cut. Asked after the frames of each piece."""
        self._credit = min(MOST_CREDIT, self._credit + CREDIT_PER_S * (now_s - self._at_s))
        self._at_s = now_s
        return self._credit < 0

    def _end(self, stream: int) -> None:
        was_answered = self._is_answered.pop(stream, None)
        if was_answered:
            self.useful_calls += 1
            self._credit += CALL_CREDIT
        elif was_answered is False:
            self._credit -= REFUSAL_COST
