"""Measures admission: how often a refusal was wrong, and how evenly tenants are served. Time is passed in.

A followed refusal records which requests were ahead of the refused one at its worker. Its own prefill could have begun
when the last of these had its first token or ended without one. If its first token could still have come in time then,
the refusal was wrong.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from router.fleet.worker import Worker
from twostroke.base.ids import RequestId, WorkerId

MOST_FOLLOWED = 4096
"""Most refusals that are followed at once. In a flood, these are a large enough sample."""


@dataclass(slots=True, eq=False)
class _Refusal:
    worker: WorkerId
    """The worker that would have computed it."""
    latest_start_s: float
    """Time after which its own prefill would have begun too late, in seconds."""
    ahead: set[RequestId]


class FalseRejections:
    def __init__(self) -> None:
        self.followed = 0
        self.count = 0
        self._behind: dict[RequestId, set[_Refusal]] = {}
        self._behind_others: dict[WorkerId, set[_Refusal]] = {}
        """Refusals without requests of this router ahead of them. Only the worker's reported queue is ahead."""
        self._until: list[tuple[float, int, _Refusal]] = []

    def __len__(self) -> int:
        return len(self._until)

    def add(self, worker: WorkerId, latest_start_s: float, ahead: Iterable[RequestId], now_s: float) -> None:
        self._forget_late(now_s)
        if len(self._until) >= MOST_FOLLOWED:
            return
        self.followed += 1
        refusal = _Refusal(worker, latest_start_s, set(ahead))
        heapq.heappush(self._until, (latest_start_s, self.followed, refusal))
        for request_id in refusal.ahead:
            self._behind.setdefault(request_id, set()).add(refusal)
        if not refusal.ahead:
            self._behind_others.setdefault(worker, set()).add(refusal)

    def gone(self, request_id: RequestId, now_s: float) -> None:
        """Notes that a request has had its first token, or has ended without one."""
        for refusal in self._behind.pop(request_id, ()):
            refusal.ahead.discard(request_id)
            if not refusal.ahead:
                self.count += now_s <= refusal.latest_start_s
        self._forget_late(now_s)

    def look(self, workers: Mapping[WorkerId, Worker], now_s: float) -> None:
        """Judges refusals that only had reported queues ahead of them, if these are empty."""
        for worker_id in list(self._behind_others):
            worker = workers.get(worker_id)
            if worker is not None and not worker.load.queued_s:
                self.count += sum(now_s <= refusal.latest_start_s for refusal in self._behind_others.pop(worker_id))
        self._forget_late(now_s)

    def _forget_late(self, now_s: float) -> None:
        """Forgets refusals whose latest start has passed."""
        while self._until and self._until[0][0] < now_s:
            _, _, refusal = heapq.heappop(self._until)
            for request_id in refusal.ahead:
                behind = self._behind[request_id]
                behind.discard(refusal)
                if not behind:
                    del self._behind[request_id]
            others = self._behind_others.get(refusal.worker)
            if others is not None:
                others.discard(refusal)
                if not others:
                    del self._behind_others[refusal.worker]


PERIOD_S = 60.0
"""Seconds of a period: long enough for every active tenant to have asked for something."""
BUCKETS = 12
"""Buckets of a period: older counts are dropped in steps of five seconds."""


@dataclass(slots=True)
class _Bucket:
    number: int
    served_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    refused_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Fairness:
    """Counts for each tenant the prefill seconds that were served and those that were refused."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()

    def served(self, tenant: str, seconds: float, now_s: float) -> None:
        self._bucket(now_s).served_s[tenant] += seconds

    def refused(self, tenant: str, seconds: float, now_s: float) -> None:
        self._bucket(now_s).refused_s[tenant] += seconds

    def index(self, queued_s: Mapping[str, float], now_s: float) -> float:
        """Returns Jain's index over tenants of served seconds / (served, refused and queued seconds)."""
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
    """Returns (sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has all (Jain, Chiu and Hawe, 1984)."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else 1.0
