"""Keeps the slowest requests of the last minute, so that a busy router still knows them when it forgets the others."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from twostroke.tracing.span import Span

WINDOW_S = 60.0
PERIOD_S = 5.0
"""Time that shares one list: the window moves on by this much."""
MOST_PER_PERIOD = 16
"""Requests that are kept of each period: some ten kilobytes each."""


@dataclass(slots=True)
class _Period:
    begin_s: float
    kept: list[tuple[float, str, Sequence[Span]]] = field(default_factory=list)
    """A heap: the fastest comes first."""


class SlowestRequests:
    def __init__(self) -> None:
        self._periods: deque[_Period] = deque()

    def ended(self, stream: str, spans: Sequence[Span], seconds: float, now_s: float) -> None:
        """Takes a request that has ended at `now_s`, if it is among the slowest of its period."""
        if not self._periods or now_s >= self._periods[-1].begin_s + PERIOD_S:
            self._forget(now_s)
            self._periods.append(_Period(now_s))
        kept = self._periods[-1].kept
        if len(kept) < MOST_PER_PERIOD:
            heapq.heappush(kept, (seconds, stream, spans))
        elif seconds > kept[0][0]:
            heapq.heapreplace(kept, (seconds, stream, spans))

    def of_the_last_minute(self, now_s: float) -> Iterator[tuple[str, Sequence[Span]]]:
        """Yields names and spans, in no order."""
        self._forget(now_s)
        for period in self._periods:
            yield from ((stream, spans) for _, stream, spans in period.kept)

    def find(self, is_meant: Callable[[str], bool]) -> tuple[str, Sequence[Span]] | None:
        """Returns name and spans of one whose name is meant, of the latest period that has any."""
        kept = (each for period in reversed(self._periods) for each in period.kept)
        return next(((stream, spans) for _, stream, spans in kept if is_meant(stream)), None)

    def _forget(self, now_s: float) -> None:
        while self._periods and self._periods[0].begin_s + PERIOD_S + WINDOW_S <= now_s:
            self._periods.popleft()
