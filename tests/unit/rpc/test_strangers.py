"""Those who have shown no token or key: what they cost a server, and that they keep nobody out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.half_calls import half_a_call
from tests.trials.chaos.neighbours.wire import CONTINUATION, HEADERS, PREFACE, SETTINGS, field, frame
from twostroke.base.errors import DeadlineExceeded, Draining
from twostroke.rpc import connections, entrance
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.entrance import Context, OpenCalls, StrangersEntrance
from twostroke.rpc.server import Callers, RpcServer
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

CHECK, LOAD = "/grpc.health.v1.Health/Check", "/twostroke.v1.Control/GetLoad"
CLIENTS = Callers(
    entrance=StrangersEntrance(lambda context: contextlib.nullcontext()), strangers_bytes=connections.STRANGERS_BYTES
)
PEERS = Callers()
WATCH = health_pb2.HealthCheckRequest(service="live")


class Loaded(control_pb2_grpc.ControlServicer):
    async def GetLoad(self, request, context):  # noqa: N802
        return control_pb2.GetLoadResponse()


@contextlib.asynccontextmanager
async def serving(callers: Callers = PEERS) -> AsyncIterator[RpcServer]:
    server = RpcServer("127.0.0.1", 0, token="secret", callers=callers)
    control_pb2_grpc.add_ControlServicer_to_server(Loaded(), server.server)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def ask_load(address: str) -> None:
    """Call like a process of the cluster, over a connection of its own."""
    channel = PeerChannel(address, "secret")
    try:
        await control_pb2_grpc.ControlStub(channel.channel).GetLoad(
            control_pb2.GetLoadRequest(), metadata=channel.metadata, timeout=20
        )
    finally:
        await channel.close()


async def test_a_call_without_the_token_ends_before_its_message_is_read() -> None:
    async with serving() as server:
        said, writer = await half_a_call(server.address, LOAD)
        assert b"is not this cluster's token" in said
        writer.close()
        wrong = {b"twostroke-token": b"guessed"}
        said, writer = await half_a_call(server.address, LOAD, wrong)
        assert b"is not this cluster's token" in said
        writer.close()
        await ask_load(server.address)


async def test_health_is_asked_in_short_messages_that_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "OPEN_MESSAGE_S", 0.3)
    async with serving() as server:
        ends = await asyncio.gather(*(half_a_call(server.address, CHECK) for _ in range(10)))
        for said, writer in ends:
            assert b"did not arrive in time" in said
            writer.close()


async def test_of_many_half_messages_few_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "OPEN_MESSAGE_S", 60.0)
    async with serving() as server:
        calls = [asyncio.create_task(half_a_call(server.address, CHECK)) for _ in range(20)]
        async with asyncio.timeout(60):
            while sum(call.done() for call in calls) < len(calls) - entrance.MOST_UNREAD:
                await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
            if call.done() and not call.cancelled():
                call.result()[1].close()
        await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("callers", [CLIENTS, PEERS], ids=["bounded", "unbounded"])
async def test_header_fields_without_end_are_cut_off(callers: Callers) -> None:
    async with serving(callers) as server:
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        reading = asyncio.create_task(reader.read())
        writer.write(PREFACE + frame(SETTINGS) + frame(HEADERS, 0, 1, field("x-more", "y")))
        more = frame(CONTINUATION, 0, 1, field("x-more", "y" * 100) * 100)
        with contextlib.suppress(ConnectionError):
            for _ in range(80):
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(connections.LOOK_S / 20)
        assert writer.is_closing() == (callers is CLIENTS)
        reading.cancel()
        writer.close()
        await ask_load(server.address)


@pytest.mark.parametrize("callers", [CLIENTS, PEERS], ids=["clients", "peers"])
async def test_a_large_first_message_is_no_strangers(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work on the machine may keep the event loop for two looks: it is asked again before that counts."""
    monkeypatch.setattr(connections, "LOOK_S", 0.01)
    async with serving(callers) as server:
        for attempt in range(5):
            with contextlib.suppress(grpc.aio.AioRpcError) if attempt < 4 else contextlib.nullcontext():
                async with grpc.aio.insecure_channel(server.address) as channel:
                    send = channel.unary_unary(LOAD)
                    assert await send(bytes(30 << 20), metadata=(("twostroke-token", "secret"),), timeout=60) == b""
                return


@pytest.mark.parametrize("idle", ["watching", "silent", "greeting"])
async def test_idle_strangers_keep_nobody_out(idle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of them, at a limit of twenty connections, and a peer that had called before."""
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    monkeypatch.setattr(connections, "SPARE", 10)
    async with serving(Callers(most_connections=20)) as server, contextlib.AsyncExitStack() as stack:
        first = PeerChannel(server.address, "secret")
        stack.push_async_callback(first.close)
        stub = control_pb2_grpc.ControlStub(first.channel)
        await stub.GetLoad(control_pb2.GetLoadRequest(), metadata=first.metadata)
        for _ in range(100):
            await _stranger(idle, server.address, stack)
        for _ in range(5):
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):  # between two looks there may be no room
                        await ask_load(server.address)
                        break
        assert first.channel.get_state() is grpc.ChannelConnectivity.READY, "it was let in, and stays"


async def _stranger(idle: str, address: str, stack: contextlib.AsyncExitStack) -> None:
    if idle == "watching":
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
        watching = health_pb2_grpc.HealthStub(channel).Watch(WATCH)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await watching.read()
        return
    _, writer = await asyncio.open_connection(*address.split(":"))
    stack.callback(writer.close)
    if idle == "greeting":
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))


async def test_watches_of_strangers_are_few_and_the_oldest_makes_room() -> None:
    async with serving(Callers(most_connections=16)) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = []
        for _ in range(5):
            watches.append(stub.Watch(WATCH))
            assert (await watches[-1].read()).status == health_pb2.HealthCheckResponse.SERVING
        for watch in watches[:3]:
            with pytest.raises(grpc.aio.AioRpcError, match="too many calls that need no key") as ended:
                await watch.read()
            assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not watches[3].done()
        assert not watches[4].done()


class OpenCall:
    """One call, as a server that serves everybody sees it. No message comes, or an empty one."""

    def __init__(self, message: bytes | None = None) -> None:
        self._message = message

    def peer(self) -> str:
        return "ipv4:192.0.2.1:5"

    async def read(self) -> bytes:
        if self._message is None:
            await asyncio.Event().wait()
        return self._message or b""


async def test_a_call_that_comes_while_its_server_ends_is_sent_elsewhere() -> None:
    calls = OpenCalls(connections.Connections(100, 1 << 20))
    calls.leave()
    with pytest.raises(Draining):
        async with calls.admit(cast("Context", OpenCall())):
            pass


async def test_a_server_may_be_stopped_again_while_the_calls_that_it_ended_unwind() -> None:
    calls = OpenCalls(connections.Connections(100, 1 << 20))

    async def watch() -> None:
        async with calls.admit(cast("Context", OpenCall())):
            await asyncio.Event().wait()

    watching = asyncio.create_task(watch())
    for _ in range(4):  # the timeout runs out in one of the iterations, and the call ends in a later one
        await asyncio.sleep(0)
        calls.leave()
    with pytest.raises(Draining):
        await watching


async def test_a_call_is_answered_that_comes_just_when_the_messages_of_others_are_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = OpenCalls(connections.Connections(100, 1 << 20))
    monkeypatch.setattr(entrance, "OPEN_MESSAGE_S", 0.01)
    silent = [
        asyncio.create_task(calls.message(None, cast("Context", OpenCall()))) for _ in range(entrance.MOST_UNREAD)
    ]
    await asyncio.sleep(0)
    time.sleep(0.02)  # noqa: ASYNC251  # the loop is late: all of them run out in one iteration
    while not silent[0].cancelling():
        await asyncio.sleep(0)
    assert not any(call.done() for call in silent)
    monkeypatch.setattr(entrance, "OPEN_MESSAGE_S", 60.0)
    assert await calls.message(None, cast("Context", OpenCall(b""))) == b""
    for ended in await asyncio.gather(*silent, return_exceptions=True):
        assert isinstance(ended, DeadlineExceeded)


async def test_who_was_let_in_may_watch_beside_any_number_of_strangers() -> None:
    async with serving(Callers(most_connections=16)) as server, grpc.aio.insecure_channel(server.address) as strangers:
        channel = PeerChannel(server.address, "secret")
        await control_pb2_grpc.ControlStub(channel.channel).GetLoad(
            control_pb2.GetLoadRequest(), metadata=channel.metadata
        )
        mine = health_pb2_grpc.HealthStub(channel.channel).Watch(WATCH)
        assert (await mine.read()).status == health_pb2.HealthCheckResponse.SERVING
        # More than have to end: gRPC may not tell a client of the end of a call in the middle of a write.
        watches = [health_pb2_grpc.HealthStub(strangers).Watch(WATCH) for _ in range(30)]
        following = [asyncio.create_task(_until_ended(watch)) for watch in watches]
        async with asyncio.timeout(60):
            while sum(each.done() for each in following) < 8:
                await asyncio.sleep(0.01)
        for each in following:
            each.cancel()
        assert not mine.done()
        mine.cancel()
        await channel.close()


async def _until_ended(watch: grpc.aio.UnaryStreamCall) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in watch:
            pass


def _lowest_free_descriptor() -> int:
    """The limit below which none is free; poll() in other threads still works, as it would not below a limit of 0."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


async def test_a_look_without_a_descriptor_left_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_S", 0.01)
    looks, listdir = [], os.listdir

    def look(folder: str) -> list[str]:
        looks.append(folder)
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", look)
    keeping = asyncio.create_task(connections.Connections(1 << 20, 1 << 20).keep(["127.0.0.1:1"]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with asyncio.timeout(60):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_lowest_free_descriptor(), hard))
            while not looks:
                await asyncio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        while len(looks) < 3:
            assert not keeping.done()
            await asyncio.sleep(0.01)
    keeping.cancel()


async def test_a_connection_that_was_let_in_stays_so_when_its_peer_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had sent more than strangers may before a few others called; then nothing more."""
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    monkeypatch.setattr(connections, "SPARE", 4)
    callers = Callers(most_connections=4, strangers_bytes=10_000)
    async with serving(callers) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_unary(LOAD)(bytes(1 << 20), metadata=(("twostroke-token", "secret"),), timeout=60)
        assert await call == b""
        for _ in range(12):
            await asyncio.sleep(2 * connections.LOOK_S)
            await ask_load(server.address)
        await asyncio.sleep(10 * connections.LOOK_S)
        assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_strangers_are_looked_at_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them would hold it for a tenth of a second at each look."""
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    threads: list[threading.Thread] = []
    count = connections._received_bytes

    def counted(seen: connections._Seen) -> int:
        threads.append(threading.current_thread())
        return count(seen)

    monkeypatch.setattr(connections, "_received_bytes", counted)
    async with serving() as server:
        host, _, port = server.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(60):
            while len(threads) < 3:
                await asyncio.sleep(0.02)
        writer.close()
    assert threading.main_thread() not in threads


async def test_a_forgotten_client_is_known_while_its_connection_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    monkeypatch.setattr(connections, "SPARE", 2)
    kept = connections.Connections(1, 1 << 20)
    async with serving() as server:
        host, _, port = server.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        address, own_port = writer.get_extra_info("sockname")
        mine = f"ipv4:{address}:{own_port}"
        keeping = asyncio.create_task(kept.keep([server.address]))
        with kept.calling(mine):
            await asyncio.sleep(0.2)
        for other in range(6):
            with kept.calling(f"ipv4:127.0.0.9:{other}"):
                pass
        assert mine not in kept._known
        assert kept.is_known(mine)
        keeping.cancel()
        writer.close()


async def test_strangers_make_room_before_a_client_whose_peer_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    monkeypatch.setattr(connections, "SPARE", 4)
    callers = Callers(most_connections=4)
    async with serving(callers) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_unary(LOAD)(b"", metadata=(("twostroke-token", "secret"),), timeout=60)
        assert await call == b""
        for _ in range(12):
            await asyncio.sleep(2 * connections.LOOK_S)
            await ask_load(server.address)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(7):
                await _stranger("silent", server.address, stack)
            await asyncio.sleep(10 * connections.LOOK_S)
            assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_a_stranger_that_takes_the_numbers_of_a_client_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_S", 0.01)
    monkeypatch.setattr(connections, "LOOK_ANYWAY_S", 0.05)
    kept = connections.Connections(10, 1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        address: tuple[str, int] = listener.getsockname()
        keeping = asyncio.create_task(kept.keep([f"127.0.0.1:{address[1]}"]))
        clients = [stack.enter_context(end) for end in _connected(listener)]
        host, port = clients[0].getsockname()
        async with asyncio.timeout(60):
            with kept.calling(f"ipv4:{host}:{port}"):
                while not kept._admitted or kept._strangers:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            for old, new in zip(clients, _connected(listener), strict=True):
                os.dup2(new.fileno(), old.fileno())
                new.close()
            while not kept._strangers:
                await asyncio.sleep(0.01)
        keeping.cancel()


def _connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname())
    return client, listener.accept()[0]
