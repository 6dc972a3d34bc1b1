"""Which worker loads new weights next, and when requests go to those that have them; and whole reloads of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.supervisor import epochs
from cluster.supervisor.reconcile.weights import LoadedWorker, next_to_reload, weights_now
from cluster.supervisor.supervisor import Supervisor
from cluster.values.desired_state import Checkpoint, Weights
from tests.unit.cluster.fake_backend import until
from tests.unit.cluster.scaling.fleets import Backend, config, supervising
from twostroke.base.errors import ConfigError, InternalError, InvalidRequest, PeerLost
from twostroke.config import Role

OLD, NEW = Checkpoint(), Checkpoint("paced:weights=1", 1)
PREFILL, DECODE = Role.PREFILL, Role.DECODE


def fleet(prefill: str, decode: str) -> list[LoadedWorker]:
    """One letter for each worker: old weights, new ones, or neither while it starts, or while Ray has no node."""
    checkpoints = {"o": OLD, "n": NEW, "-": None, "w": None}
    return [
        LoadedWorker(f"{role}-{index}", role, checkpoints[letter], has_no_room=letter == "w")
        for role, letters in ((PREFILL, prefill), (DECODE, decode))
        for index, letter in enumerate(letters)
    ]


@pytest.mark.parametrize(
    ("prefill", "decode", "next_one", "is_routed"),
    [
        pytest.param("oo", "oo", "prefill-0", False, id="prefill workers come first"),
        pytest.param("no", "oo", "decode-0", False, id="half of a role is enough at first"),
        pytest.param("no", "-o", None, False, id="one at a time"),
        pytest.param("no", "no", "prefill-1", True, id="with half of both roles requests go there"),
        pytest.param("nn", "no", "decode-1", True, id="the others follow"),
        pytest.param("nn", "nn", None, True, id="all have them"),
        pytest.param("", "oo", "decode-0", False, id="a fleet without prefill workers"),
        pytest.param("", "no", "decode-1", True, id="its half"),
        pytest.param("o", "o", "prefill-0", False, id="one worker of each role"),
        pytest.param("n", "o", "decode-0", False, id="then the decode worker"),
        pytest.param("n", "-", None, False, id="nobody serves meanwhile"),
        pytest.param("n", "n", None, True, id="both have them"),
        pytest.param("no", "n-", None, True, id="a worker that died comes back with the new weights"),
        pytest.param("o", "n", "prefill-0", True, id="only a worker with the new weights generates"),
        pytest.param("-", "n-", None, True, id="no worker is left with the old ones"),
        pytest.param("nw", "oo", "decode-0", False, id="a worker without a node is not waited for"),
        pytest.param("n", "oow", "decode-0", False, id="while two others generate"),
        pytest.param("n", "ow", None, False, id="the last that generates stays as it is"),
        pytest.param("n", "nw", None, True, id="and has them before the other has room"),
        pytest.param("w", "o", "decode-0", False, id="only another decode worker holds it back"),
    ],
)
def test_workers_load_one_after_the_other_and_requests_follow_the_half(
    prefill: str, decode: str, next_one: str | None, is_routed: bool
) -> None:
    workers = fleet(prefill, decode)
    weights = weights_now(workers, Weights(NEW, OLD))
    assert (weights.routed == NEW) is is_routed
    assert next_to_reload(workers, weights) == next_one


@asynccontextmanager
async def serving(backend: Backend, prefill: int = 2, decode: int = 2) -> AsyncIterator[Supervisor]:
    async with supervising(backend, config(prefill, decode, flexible=False)) as supervisor:
        yield supervisor


def checkpoints(supervisor: Supervisor) -> dict[str, Checkpoint]:
    return {
        name: worker.serving.checkpoint
        for name, worker in supervisor._fleet._workers.items()
        if worker.serving is not None
    }


async def test_a_reload_gives_every_worker_a_new_epoch_with_the_new_weights() -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        await supervisor.reload("", 1.0)
        assert set(checkpoints(supervisor).values()) == {Checkpoint("", 1)}
        assert len(backend.control.drains) == 4
        assert all(worker.incarnations == [1, 2] for worker in backend.workers.values())
        assert backend.written is not None
        assert backend.written.weights == Weights(Checkpoint("", 1), Checkpoint("", 1), latest=1)
        await supervisor.reload("", 1.0)
        assert set(checkpoints(supervisor).values()) == {Checkpoint("", 2)}


async def test_weights_that_cannot_be_loaded_are_given_up_and_the_old_ones_serve_on() -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        backend.workers["prefill-0"].fails_to_load = ConfigError("tensor is missing", field="model")
        with pytest.raises(ConfigError, match="prefill-0 cannot load the weights: tensor is missing"):
            await supervisor.reload("", 1.0)
        backend.workers["prefill-0"].fails_to_load = None
        await until(supervisor, "serving", "prefill-0")
        assert set(checkpoints(supervisor).values()) == {OLD}
        assert backend.workers["decode-0"].incarnations == [1]


async def test_another_model_is_refused_before_any_worker_is_touched() -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        with pytest.raises(ConfigError, match="one of them is a paced model"):
            await supervisor.reload("paced:", 1.0)
        assert all(worker.incarnations == [1] for worker in backend.workers.values())


async def test_a_second_reload_waits_for_its_turn_by_being_refused() -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        backend.control.may_end.clear()
        first = asyncio.create_task(supervisor.reload("", 5.0))
        await until(supervisor, "draining", "prefill-0")
        with pytest.raises(PeerLost, match="loading other weights already"):
            await supervisor.reload("", 5.0)
        backend.control.may_end.set()
        await first


async def test_a_worker_sleeps_in_its_process_and_serves_again_when_it_is_woken() -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        await supervisor.sleep("decode-1", 1.0)
        sleeping = backend.workers["decode-1"]
        assert supervisor._fleet._workers["decode-1"].serving is None
        assert sleeping.is_idle
        assert not sleeping.recycled
        assert supervisor._desired.wanted.decode == 1
        await supervisor.reload("", 1.0)  # it is not waited for
        await supervisor.wake_up("decode-1")
        assert checkpoints(supervisor)["decode-1"] == Checkpoint("", 1)
        assert not sleeping.recycled


async def test_the_last_worker_of_a_role_sleeps_only_with_force() -> None:
    backend = Backend()
    async with serving(backend, prefill=1, decode=1) as supervisor:
        with pytest.raises(InvalidRequest, match="last decode worker"):
            await supervisor.sleep("decode-0", 1.0)
        await supervisor.sleep("decode-0", 1.0, force=True)
        with pytest.raises(InvalidRequest, match="prefill-0 is not asleep: it is serving"):
            await supervisor.wake_up("prefill-0")


async def test_a_restarted_supervisor_lets_a_worker_sleep_on() -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        await supervisor.sleep("decode-1", 1.0)
        again = Supervisor(supervisor._spec, backend)
        run_task = asyncio.create_task(again.run())
        await until(again, "asleep", "decode-1")
        await until(again, "serving", "decode-0")
        assert backend.workers["decode-1"].incarnations == [1]
        run_task.cancel()
        await asyncio.gather(run_task, return_exceptions=True)


async def test_a_reload_goes_on_without_a_worker_that_ray_has_no_node_for_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(epochs, "ROOM_S", 0.05)
    backend = Backend()
    async with serving(backend) as supervisor:
        room = lose_node(backend, "prefill-1")
        await until(supervisor, "starting", "prefill-1")
        assert await supervisor.reload("", 1.0) == ["prefill-1"]
        assert backend.workers["prefill-1"].incarnations == [1]
        room.set()
        await until(supervisor, "serving", "prefill-1")
        assert set(checkpoints(supervisor).values()) == {Checkpoint("", 1)}


async def test_the_last_decode_worker_keeps_its_weights_until_another_one_has_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(epochs, "ROOM_S", 0.05)
    backend = Backend()
    async with serving(backend) as supervisor:
        room = lose_node(backend, "decode-1")
        await until(supervisor, "starting", "decode-1")
        with pytest.raises(PeerLost, match="no node with room for decode-1, and decode-0 is the last decode worker"):
            await supervisor.reload("", 1.0)
        assert backend.workers["decode-0"].incarnations == [1]
        room.set()
        async with asyncio.timeout(60):
            while set(checkpoints(supervisor).values()) != {Checkpoint("", 1)}:
                await supervisor._fleet.changed.wait()


def lose_node(backend: Backend, worker_id: str) -> asyncio.Event:
    """Ends a worker whose next process finds no node; returns what is to be set when there is one."""
    worker = backend.workers[worker_id]
    worker.room = asyncio.Event()
    worker.die(InternalError("its node is gone"))
    return worker.room


async def test_no_worker_restarts_while_others_load_weights_or_fall_asleep() -> None:
    backend = Backend()
    async with serving(backend) as supervisor:
        assert not supervisor._service._view().scaling.reloading
        backend.control.may_end.clear()
        reload = asyncio.create_task(supervisor.reload("", 5.0))
        await until(supervisor, "draining", "prefill-0")
        assert supervisor._service._view().scaling.reloading
        with pytest.raises(PeerLost, match="loading other weights"):
            await supervisor.drain("decode-0", 5.0, restart=True)
        backend.control.may_end.set()
        await reload
        assert not supervisor._service._view().scaling.reloading
        backend.control.may_end.clear()
        sleep = asyncio.create_task(supervisor.sleep("decode-1", 5.0))
        await until(supervisor, "draining", "decode-1")
        for worker in ("decode-0", "decode-1"):
            with pytest.raises(PeerLost, match="decode-1 is falling asleep"):
                await supervisor.drain(worker, 5.0, restart=True)
        backend.control.may_end.set()
        await sleep
        with pytest.raises(InvalidRequest, match="decode-1 sleeps: it begins anew with: twostroke wake decode-1"):
            await supervisor.drain("decode-1", 5.0, restart=True)
        assert backend.workers["decode-0"].incarnations == [1, 2]
        await supervisor.drain("decode-0", 5.0, restart=True)
        assert backend.workers["decode-0"].incarnations == [1, 2, 3]
