"""Calls that were passed on and that the router has not looked at: few, so that nobody's calls wait behind a flood.

A router looks at one call after the other, in the order in which they come. A client that opens thousands would be in
front of all who come later. So only some are passed on at a time, and connections take turns for the next ones.
"""

from __future__ import annotations

from collections.abc import Hashable

MOST_UNSEEN = 4
"""Calls ahead of the router: the next one is there when it has looked at one, and a newcomer waits for few."""
EXPIRES_S = 0.025
"""Seconds after which a call counts as looked at: gRPC does not show the router what ends before its turn."""

Call = tuple[Hashable, int]
"""A connection, and a stream of it."""


class CallWindow:
    def __init__(self) -> None:
        self._since_s: dict[Call, float] = {}
        """When each of them was passed on, the oldest one first."""

    def take(self, call: Call, now_s: float) -> bool:
        """Counts a call and returns True if it may be passed on now."""
        while (expires_s := self.expires_s()) is not None and expires_s <= now_s:
            self.seen(1)
        if len(self._since_s) >= MOST_UNSEEN:
            return False
        self._since_s[call] = now_s
        return True

    def seen(self, calls: int) -> None:
        """Counts calls that the router has looked at: the oldest."""
        for _ in range(min(calls, len(self._since_s))):
            del self._since_s[next(iter(self._since_s))]

    def ended(self, call: Call) -> None:
        """Counts a call that has ended. gRPC does not show the router calls that it refuses itself."""
        self._since_s.pop(call, None)

    def expires_s(self) -> float | None:
        """Returns when the oldest one counts as looked at."""
        return next(iter(self._since_s.values())) + EXPIRES_S if self._since_s else None
