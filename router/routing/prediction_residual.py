"""What predictions of first tokens leave out, learned from first tokens. Pure: the clock is passed in."""

from __future__ import annotations

import statistics
from collections import deque

RESIDUAL_MEMORY = 63
"""Residuals that count: enough for a steady median, few enough to follow a change within a minute of traffic."""
LEAST_RESIDUALS = 8
"""Fewer residuals say nothing: the first requests of a fleet meet everything for the first time."""
RESIDUAL_FRESH_S = 60.0
"""Older residuals do not count: while a bad minute refuses every request, no request would show a better one."""


class PredictionResidual:
    """Learns what first tokens take beyond their forecast: rpcs, parsing, waking up.

    It is a median, one for prompts that the decode worker computes and one for the others: a request that met something
    odd moves it by one place.
    """

    def __init__(self) -> None:
        self._seen: dict[bool, deque[tuple[float, float]]] = {
            local: deque(maxlen=RESIDUAL_MEMORY) for local in (False, True)
        }
        """When each was seen, and its seconds."""
        self._median_s = {False: 0.0, True: 0.0}

    def seconds(self, now_s: float, *, is_local: bool) -> float:
        seen = self._seen[is_local]
        if seen and seen[0][0] + RESIDUAL_FRESH_S < now_s:
            while seen and seen[0][0] + RESIDUAL_FRESH_S < now_s:
                seen.popleft()
            self._update(is_local)
        return self._median_s[is_local]

    def observe(self, seconds: float, now_s: float, *, is_local: bool) -> None:
        """Notes by how much a first token came later than forecast."""
        self._seen[is_local].append((now_s, seconds))
        self._update(is_local)

    def _update(self, is_local: bool) -> None:
        seen = self._seen[is_local]
        enough = len(seen) >= LEAST_RESIDUALS
        self._median_s[is_local] = max(0.0, statistics.median(seconds for _, seconds in seen)) if enough else 0.0
