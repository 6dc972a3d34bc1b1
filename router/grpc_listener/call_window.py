"""Bounds the calls that were passed on and whose handler has not begun, so that no call waits behind a flood.

A router begins calls in the order in which they come. The calls of a client that opens thousands would delay those of
all later clients. So only a few are passed on at a time, and connections take turns for the next ones.
"""

from __future__ import annotations

from collections.abc import Hashable

MOST_UNSEEN = 4
"""Calls that may wait for the router: enough to keep it busy, and few for a new client to wait for."""
EXPIRES_S = 0.025
"""Seconds after which a call counts as looked at: gRPC does not show the router what ends before its turn."""

Call = tuple[Hashable, int]
"""A connection and one of its streams."""


class CallWindow:
    def __init__(self) -> None:
        self._since_s: dict[Call, float] = {}
        """When each call was passed on that the router has not seen, in seconds; the oldest one comes first."""

    def take(self, call: Call, now_s: float) -> bool:
        """Counts a call and returns True if it may be passed on now."""
        while (expires_s := self.expires_s()) is not None and expires_s <= now_s:
            self.seen(1)
        if len(self._since_s) >= MOST_UNSEEN:
            return False
        self._since_s[call] = now_s
        return True

    def seen(self, calls: int) -> None:
        """Counts calls that the router has seen, which are the oldest."""
        for _ in range(min(calls, len(self._since_s))):
            del self._since_s[next(iter(self._since_s))]

    def ended(self, call: Call) -> None:
        """Counts a call that has ended. gRPC does not show the router calls that it refuses itself."""
        self._since_s.pop(call, None)

    def expires_s(self) -> float | None:
        """Returns when the oldest call counts as seen, in seconds. None: no call waits."""
        return next(iter(self._since_s.values())) + EXPIRES_S if self._since_s else None
