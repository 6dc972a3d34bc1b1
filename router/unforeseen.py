"""What first tokens take beyond what is forecast: rpcs, parsing, waking up. Learned, not guessed. Pure."""

from __future__ import annotations

import statistics
from collections import deque

MEMORY = 63
"""Answers that count: enough for a steady median, few enough to follow a change within a minute of traffic."""


class Unforeseen:
    """A median, of answers whose prompt the decode worker computed and of the others: a request that met something odd
    moves it by one place."""

    def __init__(self) -> None:
        self._seen: dict[bool, deque[float]] = {is_local: deque(maxlen=MEMORY) for is_local in (False, True)}
        self._median_s = {False: 0.0, True: 0.0}

    def seconds(self, *, is_local: bool) -> float:
        return max(0.0, self._median_s[is_local])

    def observe(self, seconds: float, *, is_local: bool) -> None:
        """An answer's first token came this much later than was forecast without what is unforeseen."""
        seen = self._seen[is_local]
        seen.append(seconds)
        self._median_s[is_local] = statistics.median(seen)
