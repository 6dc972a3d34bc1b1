"""What launchers wait for, beside a supervisor that is played."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.launch.supervisor_client import SupervisorClient
from cluster.supervisor.actors import Serving
from cluster.supervisor.reconcile.plan import Observed, WorkerStage
from cluster.supervisor.view import FleetSnapshot, SupervisedWorker
from cluster.terminal.announce import Announcer
from twostroke.config import Role, WorkerConfig


class Method:
    def __init__(self, answer: Any) -> None:
        self.remote = answer


class PlayedSupervisor:
    """Says once who is there, then nothing more."""

    def __init__(self, *workers: SupervisedWorker) -> None:
        self._workers = workers
        self.run, self.snapshot = Method(self._run), Method(self._snapshot)

    async def _run(self) -> None:
        await asyncio.Event().wait()

    async def _snapshot(self, after_version: int, timeout_s: float) -> FleetSnapshot:
        if after_version >= 0:
            await asyncio.Event().wait()
        return FleetSnapshot(0, self._workers)


def worker(name: str, stage: WorkerStage, advice: str = "") -> SupervisedWorker:
    serving = (
        Serving("127.0.0.1:1", "1.0000000000000001", "", "", Role.DECODE, advice, 3 << 20, 1024)
        if stage is WorkerStage.SERVING
        else None
    )
    config = WorkerConfig(role=Role.DECODE, worker_id=name)
    return SupervisedWorker(config, Observed(name, stage), serving=serving)


async def is_complete(*workers: SupervisedWorker) -> bool:
    supervisor = SupervisorClient(PlayedSupervisor(*workers), Announcer())
    attending = asyncio.create_task(supervisor.follow())
    try:
        async with asyncio.timeout(0.2):
            await supervisor.until_all_serve()
        return True
    except TimeoutError:
        return False
    finally:
        attending.cancel()
        await asyncio.gather(attending, return_exceptions=True)


async def test_a_fleet_whose_worker_has_been_drained_is_complete_for_whoever_takes_it_over() -> None:
    assert await is_complete(worker("decode-0", WorkerStage.SERVING), worker("decode-1", WorkerStage.DRAINED))


async def test_a_fleet_whose_worker_still_starts_is_waited_for() -> None:
    assert not await is_complete(worker("decode-0", WorkerStage.SERVING), worker("decode-1", WorkerStage.STARTING))


async def test_what_workers_advise_is_told_once_whoever_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert await is_complete(
        *(worker(f"decode-{number}", WorkerStage.SERVING, "it holds 448 tokens") for number in range(3))
    )
    assert capsys.readouterr().err.count("it holds 448 tokens") == 1


async def test_what_a_page_pool_holds_is_told_when_its_worker_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert await is_complete(worker("decode-0", WorkerStage.SERVING))
    assert "pages for 1,024 tokens in 3 MiB" in capsys.readouterr().err
