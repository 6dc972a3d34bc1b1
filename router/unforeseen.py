"""What first tokens take beyond what is forecast: rpcs, parsing, waking up. Learned, not guessed. Pure."""

from __future__ import annotations

import statistics
from collections import deque

MEMORY = 63
"""Answers that count: enough for a steady median, few enough to follow a change within a minute of traffic."""
LEAST = 8
"""Fewer say nothing: the first answers of a fleet meet everything for the first time."""
FRESH_S = 60.0
"""Older ones do not count. Whoever is refused for what was learned in a bad minute brings no news of a better one."""


class Unforeseen:
    """A median, of answers whose prompt the decode worker computed and of the others: a request that met something odd
    moves it by one place."""

    def __init__(self) -> None:
        self._seen: dict[bool, deque[tuple[float, float]]] = {local: deque(maxlen=MEMORY) for local in (False, True)}
        """When, and how much."""
        self._median_s = {False: 0.0, True: 0.0}

    def seconds(self, now_s: float, *, is_local: bool) -> float:
        seen = self._seen[is_local]
        if seen and seen[0][0] + FRESH_S < now_s:
            while seen and seen[0][0] + FRESH_S < now_s:
                seen.popleft()
            self._settle(is_local)
        return self._median_s[is_local]

    def observe(self, seconds: float, now_s: float, *, is_local: bool) -> None:
        """An answer's first token came this much later than was foreseen."""
        self._seen[is_local].append((now_s, seconds))
        self._settle(is_local)

    def _settle(self, is_local: bool) -> None:
        seen = self._seen[is_local]
        enough = len(seen) >= LEAST
        self._median_s[is_local] = max(0.0, statistics.median(seconds for _, seconds in seen)) if enough else 0.0
