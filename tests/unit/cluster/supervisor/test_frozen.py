"""A worker whose process is frozen for long gets a new one; one that answers late does not."""

from __future__ import annotations

import asyncio

import pytest

from cluster.ray.backend import RayWorker
from cluster.supervisor import worker_process
from cluster.supervisor.actors import ActorLocation
from cluster.supervisor.backend import WorkerDied


class Asked(RayWorker):
    """A worker without an actor that answers its questions as late as each is said to."""

    def __init__(self, *answers_s: float) -> None:
        self.recycled = 0
        self._answers_s = list(answers_s)

    async def place(self) -> ActorLocation:
        if not self._answers_s:
            raise WorkerDied("its process ended")
        await asyncio.sleep(self._answers_s.pop(0))
        return ActorLocation(pid=1, node_id="node", log_path="")

    def recycle(self) -> None:
        self.recycled += 1


@pytest.mark.parametrize(("answers_s", "recycled"), [((0.0, 0.1, 0.0), 0), ((0.0, 60.0), 1)], ids=["late", "frozen"])
async def test_only_a_worker_that_answers_nothing_for_long_is_recycled(
    answers_s: tuple[float, ...], recycled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "PING_S", 0.01)
    monkeypatch.setattr(worker_process, "FROZEN_S", 1.0)
    worker = Asked(*answers_s)
    await worker_process.recycle_when_frozen("decode-0", worker)
    assert worker.recycled == recycled
