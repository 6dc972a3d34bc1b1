"""Several routers before one fleet: each counts what the others have placed, and none depends on another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.branches import BRANCHES
from router.metrics import RouterMetrics
from router.routing.reservation_exchange import batch_from, messages_of
from router.routing.reservations import NOTHING, Reservation, ReservationChanges, Reservations, ReservedShare
from router.server import RouterServer
from router.serving.dispatcher import RouterCore
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.unit.router.serving.asking import eventually
from twostroke.base.ids import BlockHash, RequestId, RouterId, WorkerId
from twostroke.config import ListenConfig, RouterConfig
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.v1 import (
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    routing_pb2,
    routing_pb2_grpc,
)

TOKEN = "secret"
"""The fake fleet's."""
D0, D1 = WorkerId("decode-0"), WorkerId("decode-1")


class Replica:
    def __init__(self, core: RouterCore, server: RouterServer) -> None:
        self.core, self.server = core, server

    @property
    def others(self) -> float:
        """How many others it hears."""
        return self.core._metrics.registry.get_sample_value("twostroke_other_routers", {"role": "router"}) or 0.0


@asynccontextmanager
async def replica(fleet) -> AsyncIterator[Replica]:
    """A whole router that could place requests; at the end it is gone as a process would be."""
    config = RouterConfig(
        listen=ListenConfig(http_port=0, grpc_port=0),
        fleet_address=fleet.address,
        cluster_token=TOKEN,
        served_model_name="toy",
    )
    core = RouterCore(config, RouterMetrics())
    server = RouterServer(
        config,
        core,
        InlinePreparer(ByteText()),
        RouterMetrics(),
        router_id=core.router_id,
        reservations=core.reservations,
        branches=BRANCHES,
    )
    async with server.serving():
        await core.start(server.peer_address)
        try:
            await eventually(lambda: core.is_ready)
            yield Replica(core, server)
        finally:
            await core.close()


@pytest.fixture
async def pair(fleet, soon) -> AsyncIterator[tuple[Replica, Replica]]:
    """Two routers that hear each other, and two decode workers that accept nothing until they may."""
    workers = [await fleet.add(str(name)) for name in (D0, D1)]
    for worker in workers:
        worker.may_open.clear()
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(replica(fleet)) for _ in range(2)]
        await soon(lambda: (first.others, second.others) == (1, 1))
        yield first, second
        for worker in workers:
            worker.may_open.set()


async def test_a_router_goes_around_what_another_one_has_just_placed(pair, fleet, ask, soon):
    first, second = pair
    asked = [ask(first.core)]
    await soon(lambda: len(second.core.reservations) == 1)
    asked.append(ask(second.core, prompt=range(500, 600)))
    await soon(lambda: sum(len(worker.opens) for worker in fleet.workers.values()) == 2)
    assert [len(worker.opens) for worker in fleet.workers.values()] == [1, 1]
    for worker in fleet.workers.values():
        worker.may_open.set()
    assert [(await each.task).is_right for each in asked] == [True, True]
    await soon(lambda: len(first.core.reservations) == len(second.core.reservations) == 0)


@pytest.mark.parametrize("by", ["request_id", "resume_token"])
async def test_an_abort_finds_its_request_at_whatever_router_it_is_open(pair, fleet, by):
    for worker in fleet.workers.values():
        worker.hold_at = 2
        worker.may_open.set()
    addresses = [replica.server.addresses.grpc for replica in pair]
    async with AsyncExitStack() as stack:
        there, here = [
            inference_pb2_grpc.InferenceStub(await stack.enter_async_context(grpc.aio.insecure_channel(address)))
            for address in addresses
        ]
        stream = there.Generate(inference_pb2.GenerateRequest(text="tell", stop={"max_tokens": 9}))
        message = await stream.read()
        wrong = inference_pb2.AbortRequest(**{by: f"x{getattr(message, by)}"})
        assert not (await here.Abort(wrong, timeout=30)).found
        said = inference_pb2.AbortRequest(**{by: getattr(message, by)})
        assert (await here.Abort(said, timeout=30)).found
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read_to_the_end(stream)
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        assert not (await here.Abort(said, timeout=30)).found


async def read_to_the_end(stream) -> None:
    async with asyncio.timeout(30):
        while await stream.read() is not grpc.aio.EOF:
            pass


async def test_a_router_that_joins_hears_all_that_is_open(pair, fleet, ask, soon):
    first, _ = pair
    asked = [ask(first.core, request_id=f"r{number}") for number in range(5)]
    await soon(lambda: len(first.core.reservations) == 5)
    async with replica(fleet) as third:
        await soon(lambda: third.others == 2)
        await soon(lambda: len(third.core.reservations) == 5)
        assert sum(third.core.reservations.on(worker).streams for worker in (D0, D1)) == 5
    for each in asked:
        each.task.cancel()
    await asyncio.gather(*(each.task for each in asked), return_exceptions=True)


async def test_what_a_dead_router_had_placed_is_forgotten_and_the_other_one_serves_on(
    pair, fleet, ask, soon, monkeypatch
):
    monkeypatch.setattr("router.routing.reservations.LOST_GRACE_S", 0.2)
    first, second = pair
    async with replica(fleet) as third:
        await soon(lambda: third.others == 2)
        lost = ask(third.core)
        await soon(lambda: len(second.core.reservations) == 1)
    await asyncio.gather(lost.task, return_exceptions=True)
    await soon(lambda: first.others == second.others == 1)
    await soon(lambda: len(second.core.reservations) == 0)
    for worker in fleet.workers.values():
        worker.may_open.set()
    assert (await ask(second.core).task).is_right


async def test_routers_hear_each_other_while_the_supervisor_is_away(pair, fleet, ask, soon):
    first, second = pair
    port = int(fleet.address.rpartition(":")[2])
    await fleet.stop()
    asked = ask(first.core)
    await soon(lambda: len(second.core.reservations) == 1)
    await fleet.start(port)
    await soon(lambda: len(fleet._watchers) == 2)
    assert first.others == second.others == 1
    asked.task.cancel()
    await soon(lambda: len(second.core.reservations) == 0)


async def test_a_router_that_has_no_news_is_not_taken_for_a_dead_one(fleet, soon, monkeypatch, caplog):
    monkeypatch.setattr("router.routing.reservation_exchange.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("router.routing.reservation_exchange.SILENCE_S", 0.4)
    await fleet.add(str(D0))
    async with replica(fleet) as first, replica(fleet) as second:
        await soon(lambda: first.others == second.others == 1)
        await asyncio.sleep(0.6)
        assert first.others == second.others == 1
        assert "router lost" not in caplog.text
        monkeypatch.setattr("router.routing.reservation_exchange.HEARTBEAT_S", 60.0)
        await soon(lambda: "said nothing" in caplog.text)


@pytest.mark.parametrize("metadata", [(), (("twostroke-token", "wrong"),)], ids=["no token", "a wrong token"])
async def test_strangers_may_ask_a_router_whether_it_is_well_but_not_for_reservations_or_loads(pair, metadata):
    first, _ = pair
    async with grpc.aio.insecure_channel(first.server.addresses.admin) as channel:
        for service in ("", "live", "ready"):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        with pytest.raises(grpc.aio.AioRpcError, match="token"):
            await control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest(), metadata=metadata)
        watch = routing_pb2_grpc.RoutingStub(channel).WatchReservations(
            routing_pb2.WatchReservationsRequest(router_id="stranger"), metadata=metadata
        )
        with pytest.raises(grpc.aio.AioRpcError, match="token") as raised:
            await watch.read()
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_burst_is_told_in_few_messages(pair, soon):
    first, _ = pair
    reservations = first.core.reservations
    channel = PeerChannel(first.server.addresses.admin, TOKEN)
    try:
        watch = routing_pb2_grpc.RoutingStub(channel.channel).WatchReservations(
            routing_pb2.WatchReservationsRequest(router_id="test"), metadata=channel.metadata
        )
        messages = [await watch.read()]
        for number in range(500):
            reservations.place(RequestId(f"r{number}"), {D0: ReservedShare(1)}, [])
            if number % 100 == 0:
                await asyncio.sleep(0)
        while sum(len(message.placed) for message in messages) < 500:
            messages.append(await watch.read())
        assert len(messages) < 10
        for number in range(500):
            reservations.end(RequestId(f"r{number}"))
        watch.cancel()
    finally:
        await channel.close()


def test_what_does_not_fit_into_one_message_comes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.routing.reservation_exchange.MESSAGE_BLOCKS", 64)
    names = [BlockHash(index.to_bytes(16)) for index in range(32)]
    shares = {D0: ReservedShare(7, 0.25, pages=3, streams=1), D1: NOTHING}
    placed = tuple(
        Reservation(request_id=RequestId(str(number)), shares=shares, block_hashes=names, is_opened=number == 2)
        for number in range(7)
    )
    batch = ReservationChanges(placed=placed, opened=(RequestId("x"),), ended=(RequestId("y"),))
    messages = list(messages_of(batch))
    assert 1 < len(messages) < 7
    batches = [batch_from(message) for message in messages]
    assert tuple(each for part in batches for each in part.placed) == placed
    assert (batches[0].opened, batches[0].ended) == (batch.opened, batch.ended)
    reservations = Reservations()
    for index, part in enumerate(batches):
        reservations.apply(RouterId("a"), part, 0.0, whole=index == 0)
    assert reservations.requests_on(D0) == 7
    assert [len(message.placed) for message in messages_of(ReservationChanges())] == [0]
