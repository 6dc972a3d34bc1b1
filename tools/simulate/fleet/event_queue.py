"""Virtual time: what happens when, in order; equal times in the order in which they were entered."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.errors import InternalError

MOST_AT_ONCE = 1_000_000
"""Actions at one instant: more are one that calls itself again without time passing."""

Action = Callable[[], None]


@dataclass(slots=True, eq=False)
class Entry:
    """Cancelled by taking its action away."""

    action: Action | None

    def cancel(self) -> None:
        self.action = None


class EventQueue:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, Entry]] = []
        self._numbers = itertools.count()
        self._is_over = False

    def at(self, when_s: float, action: Action) -> Entry:
        """Not before now."""
        entry = Entry(action)
        heapq.heappush(self._entries, (max(when_s, self.now_s), next(self._numbers), entry))
        return entry

    def after(self, delay_s: float, action: Action) -> Entry:
        return self.at(self.now_s + delay_s, action)

    def stop(self) -> None:
        """Nothing more happens."""
        self._is_over = True

    def run(self) -> None:
        """Run until stopped. Raises InternalError where nothing is left to happen before, or time stands still."""
        entries, at_once = self._entries, 0
        while not self._is_over:
            if not entries:
                raise InternalError(f"the simulation stands still at {self.now_s:.3f} s with requests open")
            when_s, _, entry = heapq.heappop(entries)
            if entry.action is None:
                continue
            at_once = at_once + 1 if when_s == self.now_s else 0
            if at_once > MOST_AT_ONCE:
                raise InternalError(f"the simulation does not get past {when_s:.6f} s")
            self.now_s = when_s
            entry.action()
