"""The Fleet service: routers are in the view for as long as they watch it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from cluster.supervisor import fleet_service
from cluster.supervisor.fleet_service import FleetService
from twostroke.base.errors import InvalidRequest, UnsupportedFeature
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import fleet_pb2, fleet_pb2_grpc


class Watcher:
    def __init__(self, address: str, watcher: str, own_address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        request = fleet_pb2.WatchRequest(watcher=watcher, address=own_address)
        self._call = fleet_pb2_grpc.FleetStub(self._channel).Watch(request)

    async def until_routers_are(self, *expected: str) -> fleet_pb2.FleetView:
        async with asyncio.timeout(60):
            while True:
                view = await self._call.read()
                if [router.router_id for router in view.routers] == list(expected):
                    return view

    async def next_version(self) -> int:
        async with asyncio.timeout(60):
            return int((await self._call.read()).version)

    async def leave(self) -> None:
        await self._channel.close()


@pytest.fixture
async def served() -> AsyncIterator[tuple[FleetService, str]]:
    service, server = FleetService(), RpcServer("127.0.0.1", 0, token=None)
    fleet_pb2_grpc.add_FleetServicer_to_server(service, server.server)
    service.publish(fleet_pb2.FleetView(version=1, workers=[fleet_pb2.WorkerEntry(worker_id="decode-0")]))
    await server.start()
    yield service, server.address
    await server.stop(0)


async def test_routers_come_and_go_with_their_watching(served: tuple[FleetService, str]) -> None:
    service, address = served
    launcher = Watcher(address, "launcher", "")
    await launcher.until_routers_are()
    first = Watcher(address, "router-a", "h:1")
    view = await first.until_routers_are("router-a")
    assert [(router.router_id, router.address) for router in view.routers] == [("router-a", "h:1")]
    assert [worker.worker_id for worker in view.workers] == ["decode-0"]
    second = Watcher(address, "router-b", "h:2")
    for each in (first, second, launcher):
        await each.until_routers_are("router-a", "router-b")
    service.publish(fleet_pb2.FleetView(version=2))
    view = await launcher.until_routers_are("router-a", "router-b")
    assert (view.version, len(view.workers)) == (2, 0)
    await first.leave()
    await second.until_routers_are("router-b")
    await launcher.until_routers_are("router-b")
    await second.leave()
    await launcher.until_routers_are()
    await launcher.leave()


async def test_a_change_at_the_end_of_the_pause_is_not_overtaken_by_the_view_that_repeats(
    served: tuple[FleetService, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause of no length ends in the moment of every change; watchers rely on seeing DEAD before STARTING."""
    monkeypatch.setattr(fleet_service, "REPEAT_S", 0.0)
    service, address = served
    watcher = Watcher(address, "launcher", "")
    seen = [await watcher.next_version()]
    for version in range(2, 40, 2):
        service.publish(fleet_pb2.FleetView(version=version))
        service.publish(fleet_pb2.FleetView(version=version + 1))
        while seen[-1] < version + 1:
            seen.append(await watcher.next_version())
    await watcher.leave()
    assert seen == sorted(seen)
    assert set(seen) == set(range(1, 40))


async def test_a_role_is_assigned_by_who_can_and_nonsense_is_refused() -> None:
    assigned: list[tuple[str, str]] = []

    async def assign(worker: str, role: str) -> None:
        assigned.append((worker, role))

    context: Any = None
    service = FleetService(assign_role=assign)
    await service.AssignRole(fleet_pb2.AssignRoleRequest(worker_id="decode-0", role="prefill"), context)
    assert assigned == [("decode-0", "prefill")]
    for role in ("router", "", "Decode"):
        with pytest.raises(InvalidRequest, match="role must be prefill or decode"):
            await service.AssignRole(fleet_pb2.AssignRoleRequest(worker_id="decode-0", role=role), context)
    with pytest.raises(UnsupportedFeature):
        await FleetService().AssignRole(fleet_pb2.AssignRoleRequest(worker_id="decode-0", role="prefill"), context)
