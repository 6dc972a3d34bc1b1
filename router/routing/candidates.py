"""Narrows a large fleet down to the workers that may be best for one request, in time that hardly grows with the fleet.

The candidates are workers that hold the request's prefix, the least loaded ones, and a few drawn at random. The random
ones reveal a worker that reports too much load. In a small fleet all workers are candidates.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from router.fleet.worker import Worker
from router.routing.reservations import Reservations
from twostroke.base.ids import WorkerId
from twostroke.rpc.v1.control_pb2 import Load

WHOLE = 24
"""Number of workers of a role up to which all of them are candidates."""
HOLDERS = 4
"""Candidates that hold the prefix and would have computed the prompt soonest."""
DEEPEST = 2
"""Candidates that hold the longest prefix, even when they are busy: others can fetch from them."""
COMPARED_HOLDERS = 32
"""Holders that are compared, those with the most blocks first. All workers may hold a system prompt."""
LEAST_LOADED = 4
"""Number of candidates that are the least loaded ones, for each kind of load."""
DRAWN = 2
"""Number of candidates that are drawn at random."""
MOST_LOOKS = 48
"""Most workers that are compared to find the least loaded ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One request's tokens, the blocks of it that workers hold, and the queue before it at each worker."""

    tokens: int
    """Known tokens."""
    block_size: int
    held: dict[WorkerId, tuple[int, ...]]
    """Leading blocks that each worker holds or is about to hold, in total down to each tier. Workers with fewer come
    first, those with none are left out."""
    queue_s: Callable[[Worker], float]
    """Predicted seconds until the worker has computed what goes before this request."""


@dataclass(frozen=True, slots=True)
class LoadKind:
    """One way to compare loads. `now` is at least `reported`, apart from work that was done since the report."""

    reported: Callable[[Worker], WorkerLoad]
    now: Callable[[Worker, Need, Reservations], WorkerLoad]


BY_QUEUE = LoadKind(
    lambda worker: (worker.computes_until_s, -worker.load.pages_free),
    lambda worker, need, _: (need.queue_s(worker), -worker.load.pages_free),
)
"""Prefers workers that would begin a prompt soonest, and of idle ones those with most free pages."""
BY_STREAMS = LoadKind(
    lambda worker: (worker.load.waiting, worker.load.running, worker.load.pages_active),
    lambda worker, _, reservations: (
        worker.load.waiting,
        worker.load.running + reservations.requests_on(worker.worker_id),
        worker.load.pages_active,
    ),
)
"""Prefers workers whose steps are shortest."""


class Candidates:
    """Finds the candidates among the workers of one role, and follows their reports."""

    def __init__(self, kinds: Sequence[LoadKind], reservations: Reservations, seed: int | None) -> None:
        self._draws = random.Random(seed)
        self._reservations = reservations
        self._orders = [(kind, LoadOrder(self._ties_drawn(kind))) for kind in kinds]
        self._seen: dict[WorkerId, Load] = {}
        self._utilisation: dict[WorkerId, float] = {}

    def among(self, workers: Sequence[Worker], by_id: Mapping[WorkerId, Worker], need: Need) -> Sequence[Worker]:
        """Returns a few of more than `WHOLE` workers, each once. `by_id` has all of them and may have others."""
        self._follow(workers)
        chosen = self._best_holders(by_id, need)
        for kind, order in self._orders:
            chosen.update(self._least_loaded(by_id, need, kind, order))
        chosen.update(worker.worker_id for worker in self._draws.sample(workers, DRAWN))
        return [by_id[worker] for worker in sorted(chosen)]

    @property
    def utilisation(self) -> float:
        """Mean reported utilisation of all workers that `among` was last called with."""
        return sum(self._utilisation.values()) / max(1, len(self._utilisation))

    def _follow(self, workers: Sequence[Worker]) -> None:
        """Takes over the reports that have come since the last time, and forgets workers that are gone."""
        seen = self._seen
        for worker in workers:
            if seen.get(worker.worker_id) is not worker.load:
                seen[worker.worker_id] = worker.load
                self._utilisation[worker.worker_id] = worker.utilisation
                for _, order in self._orders:
                    order.put(worker)
        if len(seen) > len(workers):
            for gone in seen.keys() - {worker.worker_id for worker in workers}:
                del seen[gone], self._utilisation[gone]
                for _, order in self._orders:
                    order.drop(gone)

    def _best_holders(self, workers: Mapping[WorkerId, Worker], need: Need) -> set[WorkerId]:
        deepest = list(itertools.islice((each for each in reversed(need.held) if each in self._seen), COMPARED_HOLDERS))

        def computed_in_s(holder: WorkerId) -> float:
            worker = workers[holder]
            missing = max(0, need.tokens - need.held[holder][-1] * need.block_size)
            return need.queue_s(worker) + missing * worker.cost.prompt_token_s

        return {*deepest[:DEEPEST], *heapq.nsmallest(HOLDERS, deepest, key=computed_in_s)}

    def _least_loaded(
        self, workers: Mapping[WorkerId, Worker], need: Need, kind: LoadKind, order: LoadOrder
    ) -> list[WorkerId]:
        return order.least(
            LEAST_LOADED,
            workers,
            placements=self._reservations.requests_on,
            load_now=lambda worker: kind.now(worker, need, self._reservations),
            most_looks=MOST_LOOKS,
        )

    def _ties_drawn(self, kind: LoadKind) -> Callable[[Worker], WorkerLoad]:
        """Returns a load that orders equally loaded workers at random. The order changes with their reports."""
        return lambda worker: (*kind.reported(worker), self._draws.random())


WorkerLoad = tuple[float, ...]
"""A worker's load. Loads are compared element by element."""


class LoadOrder:
    """Finds the least loaded of many workers by looking at a few.

    A worker's load is what it reported plus what has been placed there since. So a worker without placements has at
    most the load of any worker after it in this order. The search ends when it has found enough of those. This is the
    threshold algorithm for one list (Fagin, Lotem and Naor, "Optimal aggregation algorithms for middleware", 2001).
    """

    def __init__(self, reported: Callable[[Worker], WorkerLoad]) -> None:
        """`reported` returns the load in a worker's report. It is called once for each report."""
        self._reported = reported
        self._sorted: list[tuple[WorkerLoad, WorkerId]] = []
        self._loads: dict[WorkerId, WorkerLoad] = {}

    def put(self, worker: Worker) -> None:
        """Adds a worker, or takes over its new report."""
        self.drop(worker.worker_id)
        load = self._loads[worker.worker_id] = self._reported(worker)
        bisect.insort(self._sorted, (load, worker.worker_id))

    def drop(self, worker: WorkerId) -> None:
        load = self._loads.pop(worker, None)
        if load is not None:
            del self._sorted[bisect.bisect_left(self._sorted, (load, worker))]

    def least(
        self,
        count: int,
        workers: Mapping[WorkerId, Worker],
        placements: Callable[[WorkerId], int],
        load_now: Callable[[Worker], WorkerLoad],
        most_looks: int,
    ) -> list[WorkerId]:
        """Returns the `count` least loaded of `workers`. It looks at `most_looks` at most, so it may miss some."""
        found: list[tuple[WorkerLoad, WorkerId]] = []
        unchanged = 0
        for _, worker_id in self._sorted:
            worker = workers.get(worker_id)
            if worker is None:
                continue
            found.append((load_now(worker), worker_id))
            unchanged += not placements(worker_id)
            if unchanged == count or len(found) == most_looks:
                break
        return [worker_id for _, worker_id in heapq.nsmallest(count, found)]
