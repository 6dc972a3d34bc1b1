"""Calls that were passed on and that the router has not looked at: few, so that nobody's calls wait behind a flood.

A router looks at one call after the other, in the order in which they come. A client that opens thousands would be in
front of all who come later. So only some are passed on at a time, and connections take turns for the next ones.
"""

from __future__ import annotations

from collections import deque

MOST_UNSEEN = 4
"""Calls ahead of the router: the next one is there when it has looked at one, and a newcomer waits for few."""
EXPIRES_S = 0.05
"""After this time a call counts as looked at. gRPC does not show the router calls that it refuses itself."""


class CallWindow:
    def __init__(self) -> None:
        self._since_s: deque[float] = deque()
        """When each of them was passed on."""

    def take(self, now_s: float) -> bool:
        """Returns whether one more may be passed on now, and counts it."""
        while self._since_s and self._since_s[0] + EXPIRES_S <= now_s:
            self._since_s.popleft()
        if len(self._since_s) >= MOST_UNSEEN:
            return False
        self._since_s.append(now_s)
        return True

    def seen(self, calls: int) -> None:
        """Counts calls that the router has looked at."""
        for _ in range(min(calls, len(self._since_s))):
            self._since_s.popleft()

    def expires_s(self) -> float | None:
        """Returns when the oldest one counts as looked at."""
        return self._since_s[0] + EXPIRES_S if self._since_s else None
