"""Names of adapters: stored, replaced, removed, and told to every worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from cluster.supervisor import adapters as named_adapters
from cluster.supervisor.adapters import NamedAdapters
from tests.unit.cluster.fake_backend import TOKEN, FakeBackend
from tests.unit.cluster.supervisor.pins.test_stored import damages
from twostroke.base.errors import InvalidRequest, NotFound, Overloaded
from twostroke.models.adapters.store import KEPT_S, store_dir
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import adapters_pb2, adapters_pb2_grpc, fleet_pb2, worker_pb2

NOWHERE = "127.0.0.1:1"
"""The address of a worker that has gone."""


@dataclass
class Worker(adapters_pb2_grpc.WorkerAdaptersServicer):
    told: list[set[bytes]] = field(default_factory=list)
    going_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it may answer."""

    async def Keep(self, request: adapters_pb2.KeepAdaptersRequest, context: object) -> object:  # noqa: N802
        self.told.append(set(request.digests))
        await self.going_on.wait()
        return adapters_pb2.KeepAdaptersResponse()


def viewed(names: NamedAdapters) -> list[adapters_pb2.NamedAdapter]:
    """Returns the adapters of the view that watchers of the fleet get."""
    view = fleet_pb2.FleetView()
    names.add_to_view(view)
    return list(view.adapters)


@dataclass
class Fleet:
    store: FakeBackend
    names: NamedAdapters
    worker: Worker

    async def put(self, name: str, number: int, **how: bool) -> None:
        request = adapters_pb2.PutAdapterRequest(adapter=named(name, number), **how)
        await self.names.Put(request, None)  # type: ignore[arg-type]

    async def remove(self, name: str) -> None:
        await self.names.Remove(adapters_pb2.RemoveAdapterRequest(name=name), None)  # type: ignore[arg-type]

    def served(self) -> dict[str, bytes]:
        return {each.name: each.adapter.digest for each in viewed(self.names)}

    async def until_told(self, *numbers: int) -> None:
        async with asyncio.timeout(60):
            while self.worker.told[-1:] != [{digest(number) for number in numbers}]:
                await asyncio.sleep(0.005)


def digest(number: int) -> bytes:
    return bytes([number]) * 16


def named(name: str, number: int) -> adapters_pb2.NamedAdapter:
    adapter = worker_pb2.Weights(digest=digest(number), path=f"/loras/{number}")
    return adapters_pb2.NamedAdapter(name=name, adapter=adapter, lora_rank=4)


@contextlib.asynccontextmanager
async def a_fleet() -> AsyncIterator[Fleet]:
    worker, server, store = Worker(), RpcServer("127.0.0.1", 0, token=TOKEN), FakeBackend()
    worker.going_on.set()
    adapters_pb2_grpc.add_WorkerAdaptersServicer_to_server(worker, server.server)
    await server.start()
    names = NamedAdapters(store, lambda: 7, lambda: [NOWHERE, server.address], Membership.of(TOKEN, None))
    try:
        yield Fleet(store, names, worker)
    finally:
        await names.stop()
        await server.stop(0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))


async def test_workers_hear_of_every_change_and_the_last_word_is_the_newest() -> None:
    async with a_fleet() as fleet:
        await fleet.put("a", 1)
        await fleet.until_told(1)
        fleet.worker.going_on.clear()
        await fleet.put("b", 2)
        await fleet.until_told(1, 2)
        await fleet.put("b", 3, replace=True)
        await fleet.put("c", 3)
        await fleet.remove("a")
        fleet.worker.going_on.set()
        await fleet.until_told(3)
        await fleet.remove("b")
        await fleet.until_told(3)
        await fleet.remove("c")
        await fleet.until_told()


async def test_the_copy_of_an_adapter_outlives_its_name_for_hours() -> None:
    async with a_fleet() as fleet:
        await fleet.put("a", 1)
        await fleet.until_told(1)
        withdrawn, forgotten = (store_dir() / digest(number).hex() for number in (1, 2))
        old = time.time() - KEPT_S - 1
        for copy in (withdrawn, forgotten):
            copy.mkdir(parents=True)
            os.utime(copy, (old, old))
        await fleet.remove("a")
        async with asyncio.timeout(60):
            while forgotten.exists():
                await asyncio.sleep(0.005)
        assert withdrawn.exists()


async def test_names_are_refused_that_are_taken_unknown_or_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_fleet() as fleet:
        await fleet.put("a", 1)
        with pytest.raises(InvalidRequest, match="'a' has already been loaded"):
            await fleet.put("a", 2)
        await fleet.put("a", 2, replace=True)
        with pytest.raises(InvalidRequest, match="a name and a digest"):
            await fleet.put("", 2)
        with pytest.raises(NotFound, match="'b' cannot be found"):
            await fleet.remove("b")
        await fleet.remove("a")
        with pytest.raises(NotFound, match="'a' cannot be found"):
            await fleet.remove("a")
        assert fleet.served() == {}
        monkeypatch.setattr(named_adapters, "MOST_ADAPTERS", 1)
        await fleet.put("b", 2)
        assert len(fleet.store.stored("adapter")) == 1, "a name that was removed is forgotten for another one"
        with pytest.raises(Overloaded, match="has 1 names of adapters"):
            await fleet.put("a", 3)
        assert fleet.served() == {"b": digest(2)}


async def test_a_restarted_supervisor_knows_the_names_and_a_name_that_was_removed_stays_so() -> None:
    async with a_fleet() as fleet:
        await fleet.put("a", 1)
        await fleet.put("b", 2)
        await fleet.remove("b")
        fleet.names = NamedAdapters(fleet.store, lambda: 8, list, Membership.of(TOKEN, None))
        assert fleet.served() == {"a": digest(1)}
        for name in ("a", "b"):
            await fleet.put(name, 9, first=True)
        assert fleet.served() == {"a": digest(1)}, "the command line brings nothing back"


async def test_a_stored_name_with_any_damage_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with a_fleet() as fleet:
        await fleet.put("a", 1)
        (first,) = fleet.store.messages["adapter"]
        await fleet.put("b", 2)
        for what, damaged in damages(fleet.store.messages["adapter"][first]).items():
            fleet.store.messages["adapter"][first] = damaged
            caplog.clear()
            names = NamedAdapters(fleet.store, lambda: 8, list, Membership.of(TOKEN, None))
            assert [each.name for each in viewed(names)] == ["b"], what
            (warning,) = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
            assert "load it again" in warning, what
