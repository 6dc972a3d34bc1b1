"""Supervisors without Ray whose workers come, go and switch, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cluster.supervisor.backend import WorkerDied
from cluster.supervisor.reconcile.plan import WorkerStage
from cluster.supervisor.supervisor import Supervisor
from cluster.supervisor.view import SupervisedWorker
from cluster.values.desired_state import Checkpoint
from cluster.values.spec import fleet_spec
from tests.unit.cluster.fake_backend import TOKEN, FakeBackend, FakeWorker
from twostroke.config import ClusterConfig, Role, ScalingConfig, WorkerConfig

PATIENCE_S = 60.0


class Mounted(FakeWorker):
    """A worker that behaves like a mounted one: a second caller of `run` joins the epoch that is under way."""

    async def run(self, incarnation: int, role: Role, checkpoint: Checkpoint) -> None:
        if self._end is None or self._end.done():
            await super().run(incarnation, role, checkpoint)
        else:
            await asyncio.shield(self._end)

    def remove(self) -> None:
        super().remove()
        if self._end is not None and not self._end.done():
            self._end.set_exception(WorkerDied("it was removed"))


class Backend(FakeBackend):
    def create(self, config: WorkerConfig) -> FakeWorker:
        super().create(config)
        worker = self.workers[config.worker_id] = Mounted(config.worker_id)
        worker.control, worker.room = self.control, self.room
        worker.dies_of = self.dies_of
        return worker


def config(prefill: int = 1, decode: int = 2, *, flexible: bool = True, **bounds: int) -> ClusterConfig:
    scaling = ScalingConfig(flexible=flexible, **bounds)  # type: ignore[arg-type]  # which bounds are meant
    return ClusterConfig(prefill=prefill, decode=decode, scaling=scaling)


@asynccontextmanager
async def supervising(backend: Backend, cluster: ClusterConfig | None = None) -> AsyncIterator[Supervisor]:
    async with backend.control.served():
        supervisor = Supervisor(fleet_spec(cluster or config(), token=TOKEN, port=0), backend)
        run_task = asyncio.create_task(supervisor.run())
        await until(
            supervisor, lambda workers: all(each.observed.stage is WorkerStage.SERVING for each in workers.values())
        )
        yield supervisor
        await supervisor.stop()
        await asyncio.gather(run_task, return_exceptions=True)


async def until(
    supervisor: Supervisor, is_so: Callable[[dict[str, SupervisedWorker]], bool]
) -> dict[str, SupervisedWorker]:
    version = -1
    async with asyncio.timeout(PATIENCE_S):
        while True:
            snapshot = await supervisor.snapshot(version)
            version = snapshot.version
            workers = {worker.config.worker_id: worker for worker in snapshot.workers}
            if is_so(workers):
                return workers


def roles(workers: dict[str, SupervisedWorker]) -> dict[str, str]:
    """Returns the roles of the workers that serve."""
    return {name: each.role.value for name, each in workers.items() if each.observed.stage is WorkerStage.SERVING}


async def die(supervisor: Supervisor) -> None:
    """It tells nobody."""
    assert supervisor._run_task is not None
    supervisor._run_task.cancel()
    await asyncio.gather(supervisor._run_task, return_exceptions=True)
