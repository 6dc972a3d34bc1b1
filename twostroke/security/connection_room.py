"""Room for one more connection where all places are taken: a flood of newcomers must not cost a look at all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

LOOK_S = 0.5
"""Time for which what was found holds. It is also the least time between two looks at all connections, where few of
them may go."""
FEW = 16
"""Divisor of all connections: few may go if fewer than this part of them may."""

Connection = TypeVar("Connection")


class ConnectionRoom(Generic[Connection]):
    """Connections that may go, in their order. They are looked for once for many newcomers."""

    def __init__(self) -> None:
        self._may_go: deque[Connection] = deque()
        self._looks_at_s = float("-inf")
        """When all are looked at again, at the earliest."""
        self._expires_s = float("-inf")

    def next(
        self,
        count: int,
        look: Callable[[], Iterable[Connection]],
        may_still_go: Callable[[Connection], bool],
        now_s: float,
    ) -> Connection | None:
        """Returns the one of `count` connections that goes, or None: then the newcomer does.

        `look` returns those that may, the first one first; `may_still_go` is asked a little later.
        """
        if now_s >= self._expires_s:
            self._may_go.clear()
        going = self._next_of_these(may_still_go)
        if going is None and now_s >= self._looks_at_s:
            self._may_go.extend(look())
            self._expires_s = now_s + LOOK_S
            if len(self._may_go) * FEW < count:
                self._looks_at_s = now_s + LOOK_S
            going = self._next_of_these(may_still_go)
        return going

    def _next_of_these(self, may_still_go: Callable[[Connection], bool]) -> Connection | None:
        while self._may_go:
            connection = self._may_go.popleft()
            if may_still_go(connection):
                return connection
        return None
