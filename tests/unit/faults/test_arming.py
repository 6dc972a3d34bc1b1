"""The Faults service: who may arm, what is refused, what is served where nothing can be armed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from twostroke.faults.injector import Injector
from twostroke.lifetime import Point
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.faults import serve_faults
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import faults_pb2
from twostroke.rpc.v1.faults_pb2_grpc import FaultsStub

if TYPE_CHECKING:  # exists for type checkers only
    from twostroke.rpc.v1.faults_pb2_grpc import FaultsAsyncStub

TOKEN = "the cluster's token"
PATIENCE_S = 20.0


@asynccontextmanager
async def served(injector: Injector | None) -> AsyncIterator[tuple[FaultsAsyncStub, PeerChannel]]:
    server = RpcServer("127.0.0.1", 0, token=TOKEN)
    serve_faults(injector, server.server)
    await server.start()
    peer = PeerChannel(server.address, TOKEN)
    try:
        yield FaultsStub(peer.channel), peer
    finally:
        await peer.close()
        await server.stop(0)


async def test_a_fault_is_armed_and_healed_by_call() -> None:
    injector = Injector("here")
    async with served(injector) as (stub, peer):
        await stub.Arm(faults_pb2.ArmRequest(fault="worker.events:lose:2"), metadata=peer.metadata, timeout=PATIENCE_S)
        assert [injector.reach(Point.WORKER_EVENTS) for _ in range(3)] == [False, True, False]
        await stub.Arm(faults_pb2.ArmRequest(fault="worker.events:lose"), metadata=peer.metadata, timeout=PATIENCE_S)
        healed = await stub.Heal(faults_pb2.HealRequest(), metadata=peer.metadata, timeout=PATIENCE_S)
        assert healed.reached == {"worker.events": 3}
        assert not injector.reach(Point.WORKER_EVENTS)


async def test_who_does_not_belong_to_the_cluster_arms_nothing() -> None:
    injector = Injector("here")
    async with served(injector) as (stub, _):
        for call in (stub.Arm(faults_pb2.ArmRequest(fault="worker.events:lose")), stub.Heal(faults_pb2.HealRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not injector.reach(Point.WORKER_EVENTS)


async def test_what_is_no_fault_is_refused() -> None:
    async with served(Injector("here")) as (stub, peer):
        with pytest.raises(grpc.aio.AioRpcError, match="there is no point 'nowhere'") as refusal:
            await stub.Arm(faults_pb2.ArmRequest(fault="nowhere:kill"), metadata=peer.metadata, timeout=PATIENCE_S)
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_without_an_injector_there_is_no_such_service() -> None:
    async with served(None) as (stub, peer):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Heal(faults_pb2.HealRequest(), metadata=peer.metadata, timeout=PATIENCE_S)
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
