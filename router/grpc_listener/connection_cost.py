"""The credit of a connection: useless work costs some, answers and time give some. One small frame costs 1."""

from __future__ import annotations

from router.grpc_listener.frames import (
    ACK,
    DATA,
    END_STREAM,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    STREAM,
)

FIRST_CREDIT = 2048
"""Credit of a new connection: 64 calls that are reset at once, 512 whose deadlines pass, or 2,048 useless frames."""
MOST_CREDIT = 160_000
"""Most credit that a connection can have: it may reset all of its 4,096 streams at once."""
CREDIT_PER_S = 400
"""Credit that each second gives. A flood goes on at this rate: it is read as slowly as time pays for it."""
RESET_COST = 32
"""Cost of a call that the client soon resets without an answer: the router has begun to serve it."""
LATE_RESET_COST = 4
"""What a call costs that the client resets after `LATE_S`, at a deadline of its own perhaps."""
LATE_S = 0.5
"""Seconds after which a reset is late. A flood of late resets must keep its calls open for so long."""
REFUSAL_COST = 1
"""Cost of a call that the router refuses."""
CALL_CREDIT = 512
"""Most credit that an answered call gives at its end: it pays for sixteen that are reset."""
CREDIT_PER_BYTE = 8
"""Credit that each byte of an answer gives when its call ends."""
LEAST_ANSWER_BYTES = 32
"""Bytes below which an answer gives nothing at the end of its call: the server's health needs no API key."""
FREE_DATA_BYTES = 1024
"""Bytes from which on a DATA frame of a client costs nothing. An empty one costs 1, others in proportion."""
BYTES_PER_CREDIT = 8
"""Bytes of an answer that give one unit of credit. A window of one byte lets a byte through, which pays for nothing."""
MOST_DATA_CREDIT = 4
"""Most credit that one DATA frame of an answer gives: it pays for the client's WINDOW_UPDATE and PING."""
FRAMES, HEADERS_WITHOUT_END = "frames", "headers"
UNREACHED = "unreached"
"""What the listener tells the router when it cannot reach the router's own socket."""
REASONS = (FRAMES, HEADERS_WITHOUT_END)
"""Reasons for which a connection is cut."""


class ConnectionCost:
    """The credit of one connection, and its open calls."""

    __slots__ = ("_at_s", "_calls", "_credit", "last_stream", "most_stream", "useful_calls")

    def __init__(self, now_s: float) -> None:
        self._credit: float = FIRST_CREDIT
        self._at_s = now_s
        self._calls: dict[int, tuple[float, int]] = {}
        """Open calls by stream: when each began, in seconds, and the bytes of its answer so far."""
        self.last_stream = 0
        """The highest stream that the client has opened."""
        self.most_stream = STREAM
        """The highest stream that the router accepts: after its GOAWAY it ignores later ones."""
        self.useful_calls = 0

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def is_spent(self) -> bool:
        """Whether nothing more of the client may be passed on now."""
        return self._credit < 0

    def credit(self, now_s: float) -> float:
        """Adds the credit for the time that has passed. Returns the sum."""
        self._credit = min(MOST_CREDIT, self._credit + CREDIT_PER_S * (now_s - self._at_s))
        self._at_s = now_s
        return self._credit

    def begins_call(self, stream: int) -> bool:
        """Returns whether header fields of this stream begin a call. Otherwise they end one, or gRPC ignores them."""
        return self.last_stream < stream <= self.most_stream

    def came(self, length: int, kind: int, flags: int, stream: int) -> None:
        """Counts a frame of the client."""
        if kind == DATA:
            if stream not in self._calls:
                self._credit -= 1
            elif not flags & END_STREAM:
                self._credit -= max(0.0, 1 - length / FREE_DATA_BYTES)
        elif kind == HEADERS and self.begins_call(stream):
            self.last_stream = stream
            self._calls[stream] = self._at_s, 0
        elif kind == RST_STREAM:
            began_s, answered = self._calls.pop(stream, (0.0, 1))
            is_late = self._at_s - began_s >= LATE_S
            self._credit -= 1 if answered else LATE_RESET_COST if is_late else RESET_COST
        else:
            self._credit -= 1

    def came_in_part(self) -> None:
        """Counts a piece that does not complete its header fields: they are all read again with the next one."""
        self._credit -= 1

    def sent(self, length: int, kind: int, flags: int, stream: int) -> bool:
        """Counts a frame of the router. Returns whether it ends a call."""
        if kind == DATA:
            self._credit += min(MOST_DATA_CREDIT, length / BYTES_PER_CREDIT)
            if stream in self._calls:
                began_s, answered = self._calls[stream]
                self._calls[stream] = began_s, answered + length
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self._end(stream)
            return True
        elif kind in (PING, SETTINGS) and not flags & ACK:
            self._credit += 1
        return False

    def _end(self, stream: int) -> None:
        _, answered = self._calls.pop(stream, (0.0, None))
        if answered:
            self.useful_calls += 1
            self._credit += min(CALL_CREDIT, CREDIT_PER_BYTE * answered) if answered >= LEAST_ANSWER_BYTES else 0
        elif answered == 0:
            self._credit -= REFUSAL_COST
