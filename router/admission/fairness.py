"""How evenly tenants are served: Jain's index over the last minute. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PERIOD_S = 60.0
"""Long enough for every tenant that is active to have asked for something."""
BUCKETS = 12
"""Buckets of a period: what is older falls out in steps of five seconds."""


@dataclass(slots=True)
class _Bucket:
    number: int
    served_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    refused_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Fairness:
    """Counts, per tenant, the prefill seconds that it was given and those that it was refused."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()

    def served(self, tenant: str, seconds: float, now_s: float) -> None:
        self._bucket(now_s).served_s[tenant] += seconds

    def refused(self, tenant: str, seconds: float, now_s: float) -> None:
        self._bucket(now_s).refused_s[tenant] += seconds

    def index(self, queued_s: Mapping[str, float], now_s: float) -> float:
        """Returns Jain's index of the share that each tenant got of what it asked for in the period and waits for
        now."""
        self._bucket(now_s)
        served_s: defaultdict[str, float] = defaultdict(float)
        wanted_s: defaultdict[str, float] = defaultdict(float, queued_s)
        for bucket in self._buckets:
            for tenant, seconds in bucket.served_s.items():
                served_s[tenant] += seconds
                wanted_s[tenant] += seconds
            for tenant, seconds in bucket.refused_s.items():
                wanted_s[tenant] += seconds
        return jain_index([served_s[tenant] / wanted for tenant, wanted in wanted_s.items() if wanted > 0])

    def _bucket(self, now_s: float) -> _Bucket:
        number = int(now_s * BUCKETS / PERIOD_S)
        while self._buckets and self._buckets[0].number <= number - BUCKETS:
            self._buckets.popleft()
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(_Bucket(number))
        return self._buckets[-1]


def jain_index(shares: Iterable[float]) -> float:
    """Returns (sum x)^2 / (n sum x^2): 1 where all are equal, 1/n where one has all (Jain, Chiu and Hawe, 1984)."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else 1.0
