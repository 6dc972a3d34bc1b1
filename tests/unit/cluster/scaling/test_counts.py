"""What counts as a worker of a fleet: not one that was drained, and not one that cannot start."""

from __future__ import annotations

from cluster.supervisor.reconcile.plan import WorkerStage
from cluster.supervisor.supervisor import Supervisor
from cluster.supervisor.view import SupervisedWorker
from cluster.values.desired_state import DesiredState, Slot, counts_of, revised
from cluster.values.worker_counts import WorkerCounts
from tests.unit.cluster.scaling.fleets import Backend, config, roles, supervising, until
from twostroke.base.errors import ConfigError
from twostroke.config import Role


async def counts(supervisor: Supervisor) -> tuple[int, int]:
    said = await supervisor.scaling()
    return said["wanted_prefill"], said["wanted_decode"]


async def test_a_drained_worker_leaves_its_place_in_the_counts_and_takes_it_again_when_it_is_back() -> None:
    backend = Backend()
    async with supervising(backend, config(flexible=False)) as supervisor:
        await supervisor.drain("decode-1", 1.0, False)
        assert await counts(supervisor) == (1, 1)
        await supervisor.scale(decode=2)
        workers = await until(supervisor, lambda workers: len(roles(workers)) == 3)
        assert roles(workers) == {"prefill-0": "prefill", "decode-0": "decode", "decode-2": "decode"}
        assert backend.asked == WorkerCounts(1, 2)
        await supervisor.drain("decode-1", 1.0, True)
        assert await counts(supervisor) == (1, 3)
        await until(supervisor, lambda workers: backend.asked == WorkerCounts(1, 3))


async def test_a_worker_that_cannot_start_frees_its_slot_and_is_tried_again_when_more_are_asked_for() -> None:
    backend = Backend()
    async with supervising(backend, config(flexible=False)) as supervisor:
        backend.dies_of = ConfigError("no memory is left")
        await supervisor.scale(decode=3)
        await until(
            supervisor, lambda workers: "decode-2" in workers and stage(workers["decode-2"]) is WorkerStage.FAILED
        )
        assert await counts(supervisor) == (1, 2)
        assert backend.workers["decode-2"].is_removed, "its process holds a GPU"
        await until(supervisor, lambda workers: backend.asked == WorkerCounts(1, 2))
        backend.dies_of = None
        await supervisor.scale(decode=3)
        workers = await until(supervisor, lambda workers: len(roles(workers)) == 4)
        assert set(workers) == {"prefill-0", "decode-0", "decode-1", "decode-2"}


async def test_a_planner_adds_no_more_of_a_role_in_which_a_worker_cannot_start() -> None:
    backend = Backend()
    async with supervising(backend, config(flexible=False)) as supervisor:
        backend.dies_of = ConfigError("no memory is left")
        await supervisor.scale(decode=3)
        await until(
            supervisor, lambda workers: "decode-2" in workers and stage(workers["decode-2"]) is WorkerStage.FAILED
        )
        desired = supervisor._desired
        assert desired.startable(WorkerCounts(1, 3)) == desired.startable(WorkerCounts(2, 3)) == WorkerCounts(1, 2)
        assert desired.startable(WorkerCounts(2, 2)) == WorkerCounts(2, 2)
        assert desired.startable(WorkerCounts(1, 1)) == WorkerCounts(1, 1)


def test_who_is_gone_neither_retires_nor_switches() -> None:
    slots = {"prefill-0": Slot(Role.PREFILL), "decode-0": Slot(Role.DECODE), "decode-1": Slot(Role.DECODE)}
    before = DesiredState(fleet="f", slots=slots, is_automatic=True)
    gone = {"decode-1"}
    assert counts_of(before, gone) == WorkerCounts(1, 1)
    after = revised(before, WorkerCounts(1, 2), {}, gone, may_switch=True)
    assert counts_of(after, gone) == WorkerCounts(1, 2)
    assert after.slots["decode-1"] == Slot(Role.DECODE)
    assert "decode-2" in after.slots
    assert revised(after, WorkerCounts(1, 1), {"decode-0": 1}, gone, may_switch=True).workers(Role.DECODE, gone) == [
        "decode-0"
    ]


def stage(worker: SupervisedWorker) -> WorkerStage:
    return worker.observed.stage
