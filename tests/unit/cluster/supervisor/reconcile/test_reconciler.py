"""A supervisor whose workers come, go and switch, without Ray; it may die in the middle, and so may they."""

from __future__ import annotations

import asyncio

import pytest

from cluster.ray import backend
from cluster.ray.backend import RayBackend
from cluster.supervisor.backend import WorkerDied
from cluster.supervisor.reconcile.plan import WorkerStage
from cluster.supervisor.supervisor import Supervisor
from cluster.values.desired_state import DesiredState, Slot, counts_of, revised
from cluster.values.placement import node_request_for
from cluster.values.spec import fleet_spec
from cluster.values.worker_counts import WorkerCounts
from tests.unit.cluster.fake_backend import TOKEN
from tests.unit.cluster.scaling.fleets import PATIENCE_S, Backend, config, die, roles, supervising, until
from twostroke.base.errors import ConfigError, InvalidRequest, NotFound
from twostroke.config import Role, RoleConfig


async def test_workers_that_are_asked_for_come_and_those_that_are_not_drain_and_are_forgotten() -> None:
    backend = Backend()
    async with supervising(backend, config(flexible=False)) as supervisor:
        said = await supervisor.scale(prefill=2, decode=3)
        assert backend.asked == WorkerCounts(2, 3)
        assert (said["wanted_prefill"], said["wanted_decode"], said["is_automatic"]) == (2, 3, False)
        await until(supervisor, lambda workers: len(roles(workers)) == 5)
        await supervisor.scale(prefill=1, decode=1)
        workers = await until(supervisor, lambda workers: len(workers) == 2)
        assert roles(workers) == {"prefill-0": "prefill", "decode-0": "decode"}
        assert backend.written is not None
        assert set(backend.written.slots) == {"prefill-0", "decode-0"}
        assert len(backend.control.drains) == 3
        assert backend.workers["decode-2"].is_removed


async def test_a_worker_switches_in_its_process_keeps_what_it_has_and_the_next_life_outranks_the_one_before() -> None:
    backend = Backend()
    async with supervising(backend) as supervisor:
        await supervisor.assign_role("decode-1", "prefill")
        workers = {worker.config.worker_id: worker for worker in (await supervisor.snapshot()).workers}
        assert roles(workers) == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill"}
        assert workers["decode-1"].to_message().role == "prefill"
        worker = backend.workers["decode-1"]
        assert (worker.incarnations, worker.recycled) == ([1, 2], 0)
        assert [len(drain.successors) for drain in backend.control.drains] == [0], "nothing is left to successors"
        with pytest.raises(InvalidRequest, match="decode-0 is the last decode worker"):
            await supervisor.assign_role("decode-0", "prefill")
        with pytest.raises(NotFound, match="no worker 'decode-7'"):
            await supervisor.assign_role("decode-7", "prefill")


async def test_a_count_that_can_only_be_a_slip_is_refused() -> None:
    async with supervising(Backend()) as supervisor:
        for counts in ({"decode": 0}, {"prefill": -1}, {"prefill": 10**6}):
            with pytest.raises(InvalidRequest, match="a fleet needs"):
                await supervisor.scale(**counts)
        assert len(supervisor._fleet.placed_workers()) == 3


async def test_watchers_hear_at_once_who_decides_though_nobody_comes_or_goes() -> None:
    async with supervising(Backend(), config(1, 1, max_decode=2)) as supervisor:
        assert supervisor._service._view().scaling.automatic
        await supervisor.scale(decode=1)
        assert not supervisor._service._view().scaling.automatic


async def test_workers_that_have_not_loaded_what_the_other_role_needs_keep_theirs() -> None:
    async with supervising(Backend(), config(flexible=False)) as supervisor:
        with pytest.raises(ConfigError, match="start it with --flexible"):
            await supervisor.assign_role("decode-1", "prefill")


@pytest.mark.parametrize("change", ["switch", "retire"])
async def test_what_a_supervisor_has_begun_its_next_life_ends(change: str) -> None:
    backend = Backend()
    async with supervising(backend) as first:
        backend.control.may_end.clear()
        if change == "switch":
            begun = asyncio.create_task(first.assign_role("decode-1", "prefill"))
        else:
            begun = asyncio.create_task(first.scale(prefill=1, decode=1))  # type: ignore[arg-type]  # its answer is not asked
        await until(first, lambda workers: workers["decode-1"].observed.stage is WorkerStage.DRAINING)
        await die(first)
        begun.cancel()
        second = Supervisor(fleet_spec(config(), token=TOKEN, port=0), backend)
        run_task = asyncio.create_task(second.run())
        backend.control.may_end.set()
        wanted = {"prefill-0": "prefill", "decode-0": "decode"}
        if change == "switch":
            wanted["decode-1"] = "prefill"
        workers = await until(second, lambda workers: roles(workers) == wanted and len(workers) == len(wanted))
        assert set(workers) == set(wanted)
        assert backend.workers["decode-1"].recycled == 0
        await second.stop()
        await asyncio.gather(run_task, return_exceptions=True)


async def test_a_worker_that_dies_while_it_switches_begins_anew_in_the_role_that_it_shall_have() -> None:
    backend = Backend()
    async with supervising(backend) as supervisor:
        backend.control.may_end.clear()
        switching = asyncio.create_task(supervisor.assign_role("decode-1", "prefill"))
        await until(supervisor, lambda workers: workers["decode-1"].observed.stage is WorkerStage.DRAINING)
        backend.workers["decode-1"].die(WorkerDied("killed"))
        backend.control.may_end.set()
        async with asyncio.timeout(PATIENCE_S):
            await switching
        assert backend.workers["decode-1"].role is Role.PREFILL
        assert backend.departures["decode-1"] is None


def test_room_is_asked_for_as_workers_ask_for_it_and_none_for_those_that_fit_anywhere() -> None:
    roles = {Role.PREFILL: RoleConfig(num_cpus=2.0, num_gpus=1.0, labels={"role": "prefill"})}
    room = node_request_for(WorkerCounts(2, 3), roles)
    assert room.bundles == [{"CPU": 2.0, "GPU": 1.0}] * 2
    assert room.selectors == [{"role": "prefill"}] * 2


async def test_a_switch_asks_for_no_other_room_than_the_worker_has() -> None:
    backend = Backend()
    async with supervising(backend, config(1, 2)) as supervisor:
        await supervisor.scale(prefill=2, decode=1)
        await until(supervisor, lambda workers: list(roles(workers).values()).count("prefill") == 2)
        assert backend.asked == WorkerCounts(1, 2)
        await supervisor.scale(prefill=2, decode=2)
        assert backend.asked == WorkerCounts(1, 3)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Ray's."""
    store: dict[str, str] = {}
    monkeypatch.setattr(backend.internal_kv, "_internal_kv_put", lambda key, value, **_: store.update({key: value}))
    monkeypatch.setattr(backend.internal_kv, "_internal_kv_get", lambda key, **_: store.get(key))
    monkeypatch.setattr(backend.internal_kv, "_internal_kv_del", lambda key, **_: store.pop(key))
    keys_of = lambda prefix, **_: [key.encode() for key in store if key.startswith(prefix)]  # noqa: E731
    monkeypatch.setattr(backend.internal_kv, "_internal_kv_list", keys_of)
    return store


def test_room_that_an_earlier_life_of_the_supervisor_asked_for_is_given_back(
    store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(backend, "request_resources", lambda bundles, **_: asked.append(bundles))
    needs = {Role.PREFILL: RoleConfig(num_cpus=2.0)}
    RayBackend(worker_count=1, roles=needs).request_nodes(WorkerCounts(1, 1))
    RayBackend(worker_count=1, roles=needs).forget()
    RayBackend(worker_count=1, roles=needs).forget()
    assert asked == [[{"CPU": 2.0}], []]
    assert not store


def test_lives_of_a_new_fleet_outrank_those_of_the_one_before_which_routers_may_remember(store: dict[str, str]) -> None:
    now_s = 1000.0
    subject = RayBackend(worker_count=1, clock=lambda: now_s)
    before = [subject.next_incarnation("decode-0") for _ in range(3)]
    assert before == [1000, 1001, 1002]
    subject.forget()
    now_s += 60.0
    assert subject.next_incarnation("decode-0") > before[-1]


def desired(**slots: Role) -> DesiredState:
    return DesiredState(
        fleet="f", slots={name.replace("_", "-"): Slot(role) for name, role in slots.items()}, is_automatic=True
    )


def test_those_go_first_that_hold_least_and_who_can_be_spared_becomes_what_is_lacking() -> None:
    before = desired(prefill_0=Role.PREFILL, decode_0=Role.DECODE, decode_1=Role.DECODE, decode_2=Role.DECODE)
    held = {"decode-0": 5, "decode-1": 1, "decode-2": 9}
    after = revised(before, WorkerCounts(2, 2), held, may_switch=True)
    assert after.slots["decode-1"] == Slot(Role.PREFILL)
    assert counts_of(after) == WorkerCounts(2, 2)
    apart = revised(before, WorkerCounts(2, 2), held, may_switch=False)
    assert apart.slots["decode-1"] == Slot(Role.DECODE, is_retiring=True)
    assert apart.slots["prefill-1"] == Slot(Role.PREFILL)


def test_who_does_not_serve_goes_before_one_that_serves_and_has_cached_nothing_yet() -> None:
    before = desired(prefill_0=Role.PREFILL, decode_0=Role.DECODE, decode_1=Role.DECODE)
    after = revised(before, WorkerCounts(1, 1), {"decode-1": 0}, may_switch=False)
    assert after.workers(Role.DECODE) == ["decode-1"]
    switched = revised(before, WorkerCounts(2, 1), {"decode-1": 7}, may_switch=True)
    assert switched.workers(Role.PREFILL) == ["prefill-0", "decode-1"], "but who does not serve cannot help out"
