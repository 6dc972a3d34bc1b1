"""Reloads and sleeping workers while something else fails, or while somebody wants something else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.supervisor.actors import Serving
from cluster.supervisor.backend import WorkerDied
from cluster.supervisor.reconcile.plan import WorkerStage
from cluster.supervisor.reconcile.weights import routed_fingerprint
from cluster.supervisor.supervisor import Supervisor
from cluster.values.desired_state import Checkpoint, Weights
from cluster.values.worker_counts import WorkerCounts
from tests.unit.cluster.fake_backend import until
from tests.unit.cluster.scaling.fleets import PATIENCE_S, Backend, die
from tests.unit.cluster.supervisor.reconcile.test_weights import checkpoints, serving
from twostroke.base.errors import ConfigError, InvalidRequest, PeerLost
from twostroke.config import Role

OLD = Checkpoint()


async def test_workers_that_have_loaded_weights_that_are_given_up_afterwards_return_to_the_old_ones() -> None:
    backend = Backend()
    async with serving(backend, prefill=1) as supervisor:
        backend.workers["decode-0"].fails_to_load = ConfigError("tensor is missing", field="model")
        with pytest.raises(ConfigError, match="decode-0 cannot load the weights"):
            await supervisor.reload("", 1.0)
        backend.workers["decode-0"].fails_to_load = None
        await until(supervisor, "serving", "prefill-0", epoch="3.00")
        await until(supervisor, "serving", "decode-0")
        assert set(checkpoints(supervisor).values()) == {OLD}


async def test_a_reload_after_one_that_was_given_up_is_another_one_for_every_worker() -> None:
    backend = Backend()
    async with serving(backend, prefill=1) as supervisor:
        backend.workers["decode-0"].fails_to_load = ConfigError("tensor is missing", field="model")
        with pytest.raises(ConfigError):
            await supervisor.reload("", 1.0)
        backend.workers["decode-0"].fails_to_load = None
        await supervisor.reload("", 1.0)
        assert set(checkpoints(supervisor).values()) == {Checkpoint("", 2)}


async def test_routers_that_start_after_a_reload_was_given_up_are_told_the_weights_that_serve() -> None:
    backend = Backend()
    async with serving(backend, prefill=1) as supervisor:
        backend.workers["prefill-0"].fails_to_load = ConfigError("tensor is missing", field="model")
        with pytest.raises(ConfigError):
            await supervisor.reload("", 1.0)
        await until(supervisor, "serving", "decode-0")
        assert supervisor._service._view().fingerprint == "fingerprint"


async def test_of_two_last_workers_that_are_told_to_sleep_at_once_one_stays() -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        told = (supervisor.sleep("decode-0", 1.0), supervisor.sleep("decode-1", 1.0))
        first, second = await asyncio.gather(*told, return_exceptions=True)
        assert (first, type(second)) == (None, InvalidRequest)
        assert supervisor._fleet.stage("decode-1") is WorkerStage.SERVING


@asynccontextmanager
async def half_way(backend: Backend) -> AsyncIterator[tuple[Supervisor, asyncio.Event]]:
    """A reload in which decode-0 takes all requests: prefill-1 loads until the event is set, then decode-1 does."""
    async with serving(backend) as supervisor:
        room = backend.workers["prefill-1"].room = asyncio.Event()
        reload = asyncio.create_task(supervisor.reload("", 300.0))
        await until(supervisor, "starting", "prefill-1")
        assert checkpoints(supervisor)["decode-0"] == supervisor._desired.state.weights.routed == Checkpoint("", 1)
        yield supervisor, room
        room.set()
        async with asyncio.timeout(PATIENCE_S):
            await reload


async def test_the_last_worker_with_the_weights_that_requests_go_to_may_not_leave() -> None:
    async with half_way(Backend()) as (supervisor, _):
        with pytest.raises(InvalidRequest, match="decode-0 is the last decode worker"):
            await supervisor.sleep("decode-0", 1.0)
        with pytest.raises(InvalidRequest, match="decode-0 is the last decode worker"):
            await supervisor.drain("decode-0", 1.0, False)


async def test_a_worker_with_the_new_weights_retires_once_another_one_has_them() -> None:
    async with half_way(Backend()) as (supervisor, room):
        held = {"decode-1": 9}
        supervisor._desired.scale(WorkerCounts(2, 1), held, is_automatic=False, reason="decode-0 has fewer blocks")
        for _ in range(20):
            await asyncio.sleep(0)
        assert supervisor._fleet.stage("decode-0") is WorkerStage.SERVING
        room.set()
        async with asyncio.timeout(PATIENCE_S):
            while "decode-0" in supervisor._fleet._workers:
                await supervisor._fleet.changed.wait()
        assert checkpoints(supervisor)["decode-1"] == Checkpoint("", 1)


async def test_a_worker_that_is_put_to_sleep_during_a_reload_leaves_the_others_their_deadline() -> None:
    backend = Backend()
    async with half_way(backend) as (supervisor, room):
        await supervisor.sleep("prefill-0", 0.0, force=True)
        room.set()
        await until(supervisor, "serving", "decode-1", epoch="2.00")
        assert [asked.deadline_s for asked in backend.control.drains] == [300.0, 300.0, 300.0, 0.0, 300.0]


def shown(worker_id: str, fingerprint: str, incarnation: int = 1, number: int = 0) -> Serving:
    role = Role(worker_id.rpartition("-")[0])
    return Serving(worker_id, f"{incarnation}.00", fingerprint, "", role, checkpoint=Checkpoint("", number))


def test_a_worker_that_restarted_before_the_reload_of_its_directory_does_not_take_the_requests_of_the_others() -> None:
    weights = Weights(Checkpoint("", 1), Checkpoint(), latest=1)
    restarted = [shown("prefill-0", "new", 2), shown("decode-0", "new", 2)]
    assert routed_fingerprint([*restarted, shown("decode-1", "old")], weights) == "old"
    assert routed_fingerprint([restarted[0], shown("decode-1", "old")], weights) == "old"
    assert routed_fingerprint([shown("decode-0", "newer", 2, number=1), shown("prefill-0", "old")], weights) == "old"
    assert routed_fingerprint([shown("decode-0", "newer", 2, number=1)], weights) == ""


async def test_a_worker_whose_supervisor_died_as_it_fell_asleep_serves_on_once_it_is_woken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        sleeping = backend.workers["decode-1"]
        with monkeypatch.context() as patched:
            patched.setattr(sleeping, "release", asyncio.Event().wait)
            told = asyncio.create_task(supervisor.sleep("decode-1", 1.0))
            await until(supervisor, "asleep", "decode-1")
            await die(supervisor)
            told.cancel()
        sleeping.is_idle = True
        again = Supervisor(supervisor._spec, backend)
        run_task = asyncio.create_task(again.run())
        await until(again, "asleep", "decode-1")
        drains = len(backend.control.drains)
        async with asyncio.timeout(PATIENCE_S):
            await again.wake_up("decode-1")
        assert (again._fleet.stage("decode-1"), len(backend.control.drains)) == (WorkerStage.SERVING, drains)
        await again.stop()
        await asyncio.gather(run_task, return_exceptions=True)


async def test_routers_are_not_told_to_wait_for_a_worker_that_is_asleep() -> None:
    async with serving(Backend()) as supervisor:
        await supervisor.sleep("decode-1", 1.0)
        listed = [each.worker_id for each in supervisor._service._view().workers]
        assert listed == ["prefill-0", "prefill-1", "decode-0"]


async def test_a_drained_worker_that_was_told_to_sleep_is_asked_back_in_vain_at_once() -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        backend.control.may_end.clear()
        told = asyncio.create_task(supervisor.sleep("decode-1", 5.0))
        await until(supervisor, "draining", "decode-1")
        left = asyncio.create_task(supervisor.drain("decode-1", 5.0, False, force=True))
        await asyncio.sleep(0)
        backend.control.may_end.set()
        await left
        with pytest.raises(PeerLost, match="decode-1 is drained"):
            await told
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(PeerLost, match="twostroke wake decode-1"):
                await supervisor.drain("decode-1", 5.0, True)
            await supervisor.wake_up("decode-1")


async def test_of_two_reloads_at_once_the_first_goes_on() -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        room = backend.workers["decode-0"].room = asyncio.Event()
        told = {asyncio.create_task(supervisor.reload("", 300.0)) for _ in range(2)}
        refused, going_on = await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
        assert [type(each.exception()) for each in refused] == [PeerLost]
        room.set()
        async with asyncio.timeout(PATIENCE_S):
            assert [await each for each in going_on] == [[]]
        assert set(checkpoints(supervisor).values()) == {Checkpoint("", 1)}


async def until_all_have_the_old_weights(supervisor: Supervisor) -> None:
    while supervisor._desired.state.weights.routed != OLD or set(checkpoints(supervisor).values()) != {OLD}:
        await supervisor._fleet.changed.wait()


async def test_weights_that_a_worker_dies_of_again_and_again_are_given_up_while_others_have_the_old_ones() -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        room = backend.workers["prefill-1"].room = asyncio.Event()
        reload = asyncio.create_task(supervisor.reload("", 5.0))
        await until(supervisor, "starting", "prefill-1")
        for epoch in ("2.00", "3.00", "4.00"):
            await until(supervisor, "serving", "decode-0", epoch)
            backend.workers["decode-0"].die(WorkerDied("illegal instruction"))
        await until(supervisor, "serving", "decode-0", "5.00")
        room.set()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(WorkerDied, match="decode-0 cannot load the weights: illegal instruction"):
                await reload
            while supervisor._desired.state.weights.routed != OLD or set(checkpoints(supervisor).values()) != {OLD}:
                await supervisor._fleet.changed.wait()
        assert backend.workers["decode-1"].incarnations == [1]


async def test_weights_that_a_later_worker_cannot_load_are_given_up_while_another_one_has_the_old_ones() -> None:
    backend = Backend()
    async with serving(backend, decode=4) as supervisor:
        backend.workers["decode-2"].fails_to_load = ConfigError("the directory is gone", field="model")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ConfigError, match="decode-2 cannot load the weights: the directory is gone"):
                await supervisor.reload("", 1.0)
            while supervisor._desired.state.weights.routed != OLD or set(checkpoints(supervisor).values()) != {OLD}:
                await supervisor._fleet.changed.wait()
        assert backend.workers["decode-3"].incarnations == [1]
