"""Workers that leave or switch while somebody else wants something else of them, or while they die."""

from __future__ import annotations

import asyncio

import pytest

from cluster.supervisor.backend import WorkerDied
from cluster.supervisor.reconcile.plan import WorkerStage
from cluster.supervisor.supervisor import Supervisor
from cluster.values.spec import fleet_spec
from tests.unit.cluster.fake_backend import TOKEN
from tests.unit.cluster.scaling.fleets import PATIENCE_S, Backend, config, die, roles, supervising, until
from twostroke.base.errors import ConfigError, InvalidRequest, PeerLost

TWO = {"prefill-0": "prefill", "decode-0": "decode"}


async def test_a_worker_that_is_asked_back_while_it_retires_does_not_take_the_supervisor_with_it() -> None:
    backend = Backend()
    async with supervising(backend) as supervisor:
        backend.control.may_end.clear()
        await supervisor.scale(decode=1)
        await until(supervisor, lambda workers: workers["decode-1"].observed.stage is WorkerStage.DRAINING)
        restarting = asyncio.create_task(supervisor.drain("decode-1", 1.0, True))
        await asyncio.sleep(0)
        backend.control.may_end.set()
        async with asyncio.timeout(PATIENCE_S):
            await restarting
        await until(supervisor, lambda workers: roles(workers) == TWO and len(workers) == 2)
        assert backend.workers["decode-1"].incarnations == [1, 2]
        assert len(backend.control.drains) == 2, "its second life was not killed"


async def test_a_worker_that_keeps_dying_is_not_begun_once_more_to_retire() -> None:
    backend = Backend()
    async with supervising(backend) as supervisor:
        worker = backend.workers["decode-1"]
        worker.dies_of = WorkerDied("out of memory")
        worker.die(worker.dies_of)
        await until(supervisor, lambda workers: workers["decode-1"].observed.crashes >= 2)
        worker.dies_of = None
        begun = len(worker.incarnations)
        await supervisor.scale(decode=1)
        await until(supervisor, lambda workers: roles(workers) == TWO and len(workers) == 2)
        assert (len(worker.incarnations), worker.is_removed) == (begun, True)


async def test_a_supervisor_that_finds_a_retiring_worker_lets_it_drain() -> None:
    backend = Backend()
    async with supervising(backend) as first:
        backend.control.may_end.clear()
        await first.scale(decode=1)
        await until(first, lambda workers: workers["decode-1"].observed.stage is WorkerStage.DRAINING)
        await die(first)
        second = Supervisor(fleet_spec(config(), token=TOKEN, port=0), backend)
        run_task = asyncio.create_task(second.run())
        await until(second, lambda workers: workers["decode-1"].observed.stage is WorkerStage.DRAINING)
        assert not backend.workers["decode-1"].is_removed
        backend.control.may_end.set()
        await until(second, lambda workers: roles(workers) == TWO and len(workers) == 2)
        assert backend.workers["decode-1"].is_shut_down
        await second.stop()
        await asyncio.gather(run_task, return_exceptions=True)


async def test_a_worker_that_cannot_start_is_given_no_other_role() -> None:
    backend = Backend()
    async with supervising(backend) as supervisor:
        backend.dies_of = ConfigError("no memory is left")
        await supervisor.scale(decode=3)
        await until(
            supervisor, lambda workers: "decode-2" in workers and workers["decode-2"].observed.stage == "failed"
        )
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(PeerLost, match="decode-2 is failed"):
                await supervisor.assign_role("decode-2", "prefill")


async def test_who_gave_a_worker_a_role_hears_that_somebody_else_gave_it_another_one() -> None:
    backend = Backend()
    async with supervising(backend) as supervisor:
        backend.control.may_end.clear()
        first = asyncio.create_task(supervisor.assign_role("decode-1", "prefill"))
        await until(supervisor, lambda workers: workers["decode-1"].observed.stage is WorkerStage.DRAINING)
        second = asyncio.create_task(supervisor.assign_role("decode-1", "decode"))
        await asyncio.sleep(0)
        backend.control.may_end.set()
        async with asyncio.timeout(PATIENCE_S):
            await second
            with pytest.raises(InvalidRequest, match="another command has changed decode-1"):
                await first


async def test_the_last_decode_worker_that_can_serve_keeps_its_role() -> None:
    backend = Backend()
    async with supervising(backend) as supervisor:
        await supervisor.drain("decode-1", 1.0, False)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(InvalidRequest, match="decode-0 is the last decode worker"):
                await supervisor.assign_role("decode-0", "prefill")
        assert roles(await until(supervisor, lambda workers: True)) == TWO


async def test_a_switch_waits_for_a_drain_of_the_life_before_without_asking_again_and_again() -> None:
    backend = Backend()
    async with supervising(backend) as supervisor:
        backend.control.may_end.clear()
        drain = asyncio.create_task(supervisor.drain("decode-1", 5.0, True))
        await until(supervisor, lambda workers: workers["decode-1"].observed.stage is WorkerStage.DRAINING)
        backend.workers["decode-1"].die(WorkerDied("killed"))
        await until(supervisor, lambda workers: workers["decode-1"].observed.stage is WorkerStage.SERVING)
        switching = asyncio.create_task(supervisor.assign_role("decode-1", "prefill"))
        await asyncio.sleep(0.05)
        backend.control.may_end.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(drain, switching)
        assert supervisor._service._view().scaling.switches == 1
