"""Who counts as a worker of a fleet: not one that was drained, and not one that cannot start."""

from __future__ import annotations

from cluster.plan import Stage
from cluster.planner import Counts
from cluster.scaling.changes import counts_of, revised
from cluster.scaling.roster import Post, Roster
from cluster.supervisor import Supervisor
from cluster.view import Worker
from tests.unit.cluster.scaling.fleets import Ground, config, roles, supervising, until
from twostroke.config import Role
from twostroke.errors import ConfigError


async def counts(supervisor: Supervisor) -> tuple[int, int]:
    said = await supervisor.scaling()
    return said["wanted_prefill"], said["wanted_decode"]


async def test_a_drained_worker_leaves_its_place_in_the_counts_and_takes_it_again_when_it_is_back() -> None:
    ground = Ground()
    async with supervising(ground, config(flexible=False)) as supervisor:
        await supervisor.drain("decode-1", 1.0, False)
        assert await counts(supervisor) == (1, 1)
        await supervisor.scale(decode=2)
        workers = await until(supervisor, lambda workers: len(roles(workers)) == 3)
        assert roles(workers) == {"prefill-0": "prefill", "decode-0": "decode", "decode-2": "decode"}
        assert ground.asked == Counts(1, 2)
        await supervisor.drain("decode-1", 1.0, True)
        assert await counts(supervisor) == (1, 3)
        await until(supervisor, lambda workers: ground.asked == Counts(1, 3))


async def test_a_worker_that_cannot_start_frees_its_slot_and_is_tried_again_when_more_are_asked_for() -> None:
    ground = Ground()
    async with supervising(ground, config(flexible=False)) as supervisor:
        ground.dies_of = ConfigError("no memory is left")
        await supervisor.scale(decode=3)
        await until(supervisor, lambda workers: "decode-2" in workers and stage(workers["decode-2"]) is Stage.FAILED)
        assert await counts(supervisor) == (1, 2)
        assert ground.workers["decode-2"].is_removed, "its process holds a GPU"
        await until(supervisor, lambda workers: ground.asked == Counts(1, 2))
        ground.dies_of = None
        await supervisor.scale(decode=3)
        workers = await until(supervisor, lambda workers: len(roles(workers)) == 4)
        assert set(workers) == {"prefill-0", "decode-0", "decode-1", "decode-2"}


async def test_a_planner_adds_no_more_of_a_role_in_which_a_worker_cannot_start() -> None:
    ground = Ground()
    async with supervising(ground, config(flexible=False)) as supervisor:
        ground.dies_of = ConfigError("no memory is left")
        await supervisor.scale(decode=3)
        await until(supervisor, lambda workers: "decode-2" in workers and stage(workers["decode-2"]) is Stage.FAILED)
        staff = supervisor._staff
        assert staff.startable(Counts(1, 3)) == staff.startable(Counts(2, 3)) == Counts(1, 2)
        assert staff.startable(Counts(2, 2)) == Counts(2, 2)
        assert staff.startable(Counts(1, 1)) == Counts(1, 1)


def test_who_is_gone_neither_retires_nor_switches() -> None:
    posts = {"prefill-0": Post(Role.PREFILL), "decode-0": Post(Role.DECODE), "decode-1": Post(Role.DECODE)}
    before = Roster(fleet="f", posts=posts, is_automatic=True)
    gone = {"decode-1"}
    assert counts_of(before, gone) == Counts(1, 1)
    after = revised(before, Counts(1, 2), {}, gone, may_switch=True)
    assert counts_of(after, gone) == Counts(1, 2)
    assert after.posts["decode-1"] == Post(Role.DECODE)
    assert "decode-2" in after.posts
    assert revised(after, Counts(1, 1), {"decode-0": 1}, gone, may_switch=True).staff(Role.DECODE, gone) == ["decode-0"]


def stage(worker: Worker) -> Stage:
    return worker.observed.stage
