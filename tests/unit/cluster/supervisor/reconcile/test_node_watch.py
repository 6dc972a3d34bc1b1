"""Nodes that shall be left, without Ray: their workers drain one after the other and begin new lives elsewhere."""

from __future__ import annotations

import asyncio

import pytest

from cluster.supervisor import worker_process
from cluster.supervisor.reconcile import drains
from cluster.supervisor.reconcile.plan import LONGEST_LEAVE_S, NEAR_S
from tests.unit.cluster.fake_backend import FakeBackend, two_decode_workers, until

DECODE = ("decode-0", "decode-1")


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "LOOK_S", 0.01)


async def test_workers_leave_such_a_node_in_turn_with_the_time_it_has_and_hand_nothing_to_those_that_leave_next() -> (
    None
):
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        backend.control.may_end.clear()
        backend.leaving["node"] = 1000.0
        await until(supervisor, "draining", "prefill-0")
        await until(supervisor, "draining", "decode-0")
        await asyncio.sleep(0.1)
        assert len(backend.control.drains) == 2, "decode-1 waits for its turn"
        assert {asked.deadline_s for asked in backend.control.drains} == {LONGEST_LEAVE_S}
        assert not any(asked.successors for asked in backend.control.drains)
        backend.control.may_end.set()
        for worker_id in ("prefill-0", *DECODE):
            worker = await until(supervisor, "serving", worker_id, epoch="2.00")
            assert worker.place is not None
            assert worker.place.node_id == "another node"
        assert [successor.worker_id for successor in backend.control.drains[2].successors] == ["decode-0"]
        await asyncio.sleep(0.1)
        assert len(backend.control.drains) == 3, "whoever is elsewhere stays"


async def test_where_no_other_node_has_room_one_worker_waits_for_it_and_the_log_says_so_while_the_others_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(worker_process, "PLACED_S", 0.01)
    monkeypatch.setattr(worker_process.log, "warning", lambda text, worker_id: told.append(text % worker_id))
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        backend.room.clear()
        backend.leaving["node"] = 1000.0
        await until(supervisor, "starting", "decode-0")
        while "worker has no process yet: Ray waits for a node with room for it worker=decode-0" not in told:
            await asyncio.sleep(0.01)
        assert (await until(supervisor, "serving", "decode-1")).to_message().epoch == "1.00"
        backend.room.set()
        for worker_id in DECODE:
            await until(supervisor, "serving", worker_id, epoch="2.00")


async def test_all_drain_at_once_where_the_nodes_end_comes_near_while_they_wait_for_their_turn() -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        backend.control.may_end.clear()
        backend.leaving["node"] = 1000.0
        await until(supervisor, "draining", "decode-0")
        backend.leaving["node"] = NEAR_S
        await until(supervisor, "draining", "decode-1")
        backend.control.may_end.set()
        for worker_id in DECODE:
            await until(supervisor, "serving", worker_id, epoch="2.00")


async def test_a_look_that_nobody_answers_is_not_the_last() -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        backend.silent_looks = 3
        backend.leaving["node"] = 10.0
        await until(supervisor, "serving", epoch="2.00")
        assert backend.silent_looks == 0
