"""Workers in the order of the load that they reported, kept from decision to decision."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Mapping

from router.fleet.worker import Worker
from twostroke.base.ids import WorkerId

WorkerLoad = tuple[float, ...]
"""Loads are compared part by part."""


class LoadOrder:
    """Finds the least loaded of many workers by looking at a few.

    A worker's load is what it reported plus what has been placed there since. So a worker without placements has at
    most the load of any worker after it in this order. The search ends when it has found enough of those. This is the
    threshold algorithm for one list (Fagin, Lotem and Naor, "Optimal aggregation algorithms for middleware", 2001).
    """

    def __init__(self, reported: Callable[[Worker], WorkerLoad]) -> None:
        """What `reported` returns changes only with a worker's reports."""
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
        """Returns the `count` least loaded of `workers`, or nearly those where `most_looks` are not enough."""
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
