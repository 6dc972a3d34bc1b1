"""Keeps which workers are changed now: they leave, begin anew, fall asleep or switch role."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from cluster.supervisor.fleet import SupervisedFleet


class Changes:
    def __init__(self, fleet: SupervisedFleet) -> None:
        self._fleet = fleet
        self._busy: set[str] = set()

    @property
    def busy(self) -> frozenset[str]:
        """Ids of the workers that are changed now."""
        return frozenset(self._busy)

    def begin(self, worker_id: str, work: Coroutine[None, None, None], tasks: asyncio.TaskGroup) -> None:
        """Changes a worker in a task of `tasks`. It is busy until that has ended."""
        self._busy.add(worker_id)
        task = tasks.create_task(work)
        task.add_done_callback(lambda _: self._end(worker_id))

    def _end(self, worker_id: str) -> None:
        self._busy.discard(worker_id)
        self._fleet.wake()
