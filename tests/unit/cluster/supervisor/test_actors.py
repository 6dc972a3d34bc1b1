"""A worker mounted on Ray, without Ray: it is told to end, and answers when it may be killed."""

from __future__ import annotations

import asyncio

import pytest

from cluster.supervisor.actors import MountedWorker
from cluster.values.desired_state import Checkpoint
from twostroke.base import allocator
from twostroke.config import Role, WorkerConfig
from twostroke.worker.host import ReadyInfo


class Plain:
    """A worker that takes a while to start and another to tidy up."""

    engine_state = None

    def __init__(self, role: Role) -> None:
        self.role = role
        self.may_start = asyncio.Event()
        self.stop = asyncio.Event()
        self.serves = asyncio.Event()
        self.is_tidy = False

    async def run(self, incarnation: int) -> None:
        await self.may_start.wait()
        self.serves.set()
        await self.stop.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        self.is_tidy = True

    async def ready(self) -> ReadyInfo:
        await self.serves.wait()
        return ReadyInfo("decode-0", self.role.value, "host:1", "1.00", "fingerprint", "metrics:1", 1)

    async def shutdown(self) -> None:
        self.stop.set()


class Mounted(MountedWorker):
    plain: Plain

    def _load(self, config: WorkerConfig, engine_state: object) -> Plain:
        self.plain = Plain(config.role)
        return self.plain


def mounted() -> Mounted:
    return Mounted(WorkerConfig(role=Role.DECODE, worker_id="decode-0", host="127.0.0.1"))


@pytest.fixture(autouse=True)
def no_frozen_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector is this process's own, which goes on with other tests."""
    monkeypatch.setattr(allocator, "freeze_loaded_objects", lambda: None)


async def test_a_worker_that_serves_has_tidied_up_when_it_says_that_it_is_shut_down() -> None:
    worker = mounted()
    run_task = asyncio.create_task(worker.run(1, Role.DECODE, Checkpoint()))
    worker.plain.may_start.set()
    assert (await worker.ready(1)).address == "host:1"
    await worker.shutdown()
    assert worker.plain.is_tidy
    await run_task


async def test_a_start_is_not_waited_for() -> None:
    worker = mounted()
    run_task = asyncio.create_task(worker.run(1, Role.DECODE, Checkpoint()))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await worker.shutdown()
    assert not worker.plain.is_tidy
    worker.plain.may_start.set()
    await run_task


async def test_who_asks_whether_a_life_serves_before_it_has_begun_hears_of_that_life_and_of_no_other() -> None:
    """Ray keeps no order among the calls to an actor like this one."""
    config = WorkerConfig(role=Role.DECODE, worker_id="decode-0", host="127.0.0.1", flexible=True)
    worker = Mounted(config)
    for incarnation, role in enumerate((Role.PREFILL, Role.DECODE), start=1):
        ready = asyncio.create_task(worker.ready(incarnation))
        await asyncio.sleep(0)
        run_task = asyncio.create_task(worker.run(incarnation, role, Checkpoint()))
        await asyncio.sleep(0)
        worker.plain.may_start.set()
        async with asyncio.timeout(60):
            assert (await ready).role is role
            await worker.shutdown()
            await run_task
