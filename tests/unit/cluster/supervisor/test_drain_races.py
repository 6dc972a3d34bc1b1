"""Drains of workers that die, come back or are drained again at that very moment."""

from __future__ import annotations

import asyncio

import pytest

from cluster.supervisor.backend import WorkerDied
from tests.unit.cluster.fake_backend import FakeBackend, two_decode_workers, until
from twostroke.base.errors import PeerLost


@pytest.mark.parametrize("restart", [True, False])
async def test_a_worker_that_dies_in_the_moment_in_which_it_is_to_drain_has_left(restart: bool) -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        drain = asyncio.create_task(supervisor.drain("decode-0", 1.0, restart))
        backend.workers["decode-0"].die(WorkerDied("killed"))
        async with asyncio.timeout(60):
            await drain
        await until(supervisor, "serving" if restart else "drained")
        assert backend.workers["decode-0"].is_removed is not restart


async def test_a_process_that_died_while_it_drained_is_not_killed_once_more() -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        backend.control.may_end.clear()
        drain = asyncio.create_task(supervisor.drain("decode-0", 7.0, True))
        await until(supervisor, "draining")
        backend.workers["decode-0"].die(WorkerDied("killed"))
        await until(supervisor, "serving", epoch="2.00")
        assert backend.workers["decode-0"].recycled == 0, "Ray has begun a fresh one already"
        backend.control.may_end.set()
        await drain


async def test_who_asks_for_a_drain_when_the_one_before_is_just_over_gets_one_of_its_own() -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        first = asyncio.create_task(supervisor.drain("decode-0", 7.0, True))
        await until(supervisor, "serving", epoch="2.00")
        second = asyncio.create_task(supervisor.drain("decode-0", 7.0, False))
        assert await asyncio.gather(first, second) == [2, 2]
        await until(supervisor, "drained")
        assert len(backend.control.drains) == 2


async def test_who_gives_up_waiting_for_a_drain_ends_it_for_nobody_else() -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        backend.control.may_end.clear()
        first, second = (asyncio.create_task(supervisor.drain("decode-0", 7.0, True)) for _ in range(2))
        await until(supervisor, "draining")
        first.cancel()
        await asyncio.wait([first])
        backend.control.may_end.set()
        assert await second == 2
        await until(supervisor, "serving", epoch="2.00")
        assert len(backend.control.drains) == 1


async def test_a_fleet_that_stops_writes_nothing_down_that_the_next_one_would_find() -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        await supervisor.stop()
        with pytest.raises(PeerLost):
            await supervisor.drain("decode-0", 1.0, False)
    assert not backend.departures.get("decode-0")
