"""Clients that only cost are cut, and nobody else is: over real sockets, with the server behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.addresses import bind_listener
from router.grpc_listener import connection_cost, listener
from router.grpc_listener.connection import ClientConnection, ConnectionStage
from router.grpc_listener.listener import GrpcListener
from router.http_server.protocol import STALL_S
from tests.trials.chaos.neighbours.wire import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST,
    SETTINGS,
    WINDOW,
    field,
    frame,
    message,
)
from tests.unit.router.grpc_listener.conftest import SERVICE, served

ALONE = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
CALM = 11
PATIENCE_S = 60.0


def fields(method: str, name: str = "flood", service: str = SERVICE) -> bytes:
    said = [(":method", "POST"), (":scheme", "http"), (":path", f"/{service}/{method}"), (":authority", "x")]
    said += [("content-type", "application/grpc"), ("te", "trailers"), ("name", name)]
    return b"".join(field(*each) for each in said)


@contextlib.asynccontextmanager
async def connected(
    address: str, settings: bytes = b""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(PREFACE + frame(SETTINGS, payload=settings))
    try:
        yield reader, writer
    finally:
        writer.close()


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, int, int, bytes]:
    first, flags, stream = struct.unpack(">IBI", await reader.readexactly(9))
    return first & 255, flags, stream, await reader.readexactly(first >> 8)


async def goaway_of(reader: asyncio.StreamReader) -> bytes:
    """Returns the payload of the frame that ends a connection."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            kind, _, _, payload = await next_frame(reader)
            if kind == GOAWAY:
                return payload


async def echoed(address: str, body: bytes = b"hello", name: str = "honest") -> None:
    async with grpc.aio.insecure_channel(address, options=ALONE) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Echo")(body, metadata=(("name", name),), timeout=PATIENCE_S)
        assert await call == body


FLOODS: dict[str, Callable[[int], bytes]] = {
    "pings": lambda n: frame(PING, payload=struct.pack(">Q", n)),
    "settings": lambda n: frame(SETTINGS, payload=struct.pack(">HI", 4, 65535 + n % 2)),
    "windows": lambda n: frame(WINDOW, payload=struct.pack(">I", 1)),
    "priorities": lambda n: frame(PRIORITY, 0, n + 2, struct.pack(">IB", 1, 7)),
    "unknown frames": lambda n: frame(0xAA, 0xFF, n, b"z" * 100),
    "empty data": lambda n: (frame(HEADERS, END_HEADERS, 1, fields("Stall")) if n == 1 else b"") + frame(DATA, 0, 1),
    "continuations": lambda n: (
        frame(HEADERS, 0, 1, fields("Echo")) if n == 1 else frame(CONTINUATION, 0, 1, field("x", "y" * 100) * 10)
    ),
    "rapid resets": lambda n: frame(HEADERS, END_HEADERS, n, fields("Stall")) + frame(RST, 0, n, struct.pack(">I", 8)),
    "calls of nothing": lambda n: (
        frame(HEADERS, END_HEADERS, n, fields("Nothing")) + frame(DATA, END_STREAM, n, message(b""))
    ),
}


@pytest.mark.parametrize("name", [name for name in FLOODS if name != "continuations"])
async def test_a_flood_goes_on_as_slowly_as_time_pays_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut after a while, and told why; others are served meanwhile."""
    monkeypatch.setattr(connection_cost, "FIRST_CREDIT", 40)
    monkeypatch.setattr(listener, "MOST_PACED_S", 1.0)
    monkeypatch.setattr(listener, "LINGER_S", 0.2)
    spent, came = [0.0], connection_cost.ConnectionCost.came

    def counted(cost: connection_cost.ConnectionCost, length: int, kind: int, flags: int, stream: int) -> None:
        before = cost._credit
        came(cost, length, kind, flags, stream)
        spent[0] += max(0, before - cost._credit)

    monkeypatch.setattr(connection_cost.ConnectionCost, "came", counted)
    async with served() as server, connected(server.address) as (reader, writer):
        telling = asyncio.create_task(goaway_of(reader))
        began_s = time.monotonic()
        writer.write(b"".join(FLOODS[name](stream) for stream in range(1, 4000, 2)))
        await echoed(server.address)
        error, text = struct.unpack(">I", (said := await telling)[4:8])[0], said[8:]
        assert error == CALM
        assert b"costs too much for what its calls are worth" in text
        most = 40 + connection_cost.CREDIT_PER_S * (time.monotonic() - began_s) + 2 * connection_cost.RESET_COST
        assert spent[0] < most + 20  # a few frames are the honest client's
        await echoed(server.address)
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while await reader.read(1 << 16):  # until it is closed
                    pass


async def test_header_fields_without_end_are_cut_at_once() -> None:
    async with served() as server, connected(server.address) as (reader, writer):
        writer.write(b"".join(FLOODS["continuations"](stream) for stream in range(1, 400, 2)))
        assert b"headers" in await goaway_of(reader)
        await echoed(server.address)


async def test_header_fields_that_do_not_come_to_their_end_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "ARRIVAL_S", 0.3)
    async with served() as server, connected(server.address) as (reader, writer):
        writer.write(frame(HEADERS, END_HEADERS, 1, fields("Echo"))[:20])
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                while await reader.read(1 << 16):
                    pass


async def test_open_calls_are_answered_while_their_connection_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_cost, "FIRST_CREDIT", 400)
    async with served() as server, connected(server.address) as (reader, writer):
        writer.write(frame(HEADERS, END_HEADERS, 1, fields("Stream")) + frame(DATA, END_STREAM, 1, message(b"500")))
        for n in range(3, 103, 2):
            writer.write(FLOODS["rapid resets"](n))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                kind, flags, stream, payload = await next_frame(reader)
                assert kind != GOAWAY, payload
                if kind == HEADERS and stream == 1 and flags & END_STREAM:
                    break
        assert not server.cuts


async def test_calls_of_others_do_not_wait_behind_a_flood_of_calls() -> None:
    """Four clients open 400 calls each and never end them; another one then makes a call."""
    async with served() as server, contextlib.AsyncExitStack() as stack:
        begin = b"".join(frame(HEADERS, END_HEADERS, n, fields("Stall")) for n in range(1, 800, 2))
        for _ in range(4):
            _, writer = await stack.enter_async_context(connected(server.address))
            writer.write(begin)
            await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            while len(server.calls.seen) < 20:
                await asyncio.sleep(0)
        await echoed(server.address)
        ahead = server.calls.seen.index("honest")
        assert ahead < 1000, f"{ahead} calls of the flood came first"
        async with asyncio.timeout(PATIENCE_S):
            while len(server.calls.seen) < 1601:
                await asyncio.sleep(0.01)


async def test_of_a_client_that_reads_nothing_little_is_taken() -> None:
    async with served() as server:
        _, writer = await asyncio.open_connection(*server.address.split(":"), limit=1024)
        writer.transport.pause_reading()
        body = message(b"x" * 8000)
        writer.write(PREFACE + frame(SETTINGS))
        for n in range(1, 8000, 2):
            writer.write(frame(HEADERS, END_HEADERS, n, fields("Echo")) + frame(DATA, END_STREAM, n, body))
            writer.write(frame(WINDOW, payload=struct.pack(">I", 8005)) + frame(WINDOW, 0, n, struct.pack(">I", 8005)))
            if n % 50 == 1:
                await asyncio.sleep(0)
        before = -1
        while before != len(server.calls.seen):
            before = len(server.calls.seen)
            await asyncio.sleep(0.5)
        assert before < 3000
        await echoed(server.address)
        writer.transport.abort()


async def test_who_reads_nothing_makes_room_and_is_closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listener.STALL_S == STALL_S
    for name, is_for_room in (("STUCK_S", True), ("STALL_S", False)):
        monkeypatch.setattr(listener, "STUCK_S", 1000.0)
        monkeypatch.setattr(listener, name, 0.2)
        async with served(most=2) as server:
            stuck = [never_reading(server.address) for _ in range(2)]
            await asyncio.sleep(1.5)
            if is_for_room:
                await echoed(server.address)
            async with asyncio.timeout(5):
                while not any(is_reset(each) for each in stuck):
                    await asyncio.sleep(0.05)
            for each in stuck:
                each.close()


def never_reading(address: str) -> socket.socket:
    """Asks for messages of 12 MB in all, which it does not read."""
    host, port = address.split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect((host, int(port)))
    opened = struct.pack(">I", 1 << 30)
    said = PREFACE + frame(SETTINGS, payload=struct.pack(">HI", 4, (1 << 31) - 1)) + frame(WINDOW, payload=opened)
    call = frame(HEADERS, END_HEADERS, 1, fields("Stream")) + frame(DATA, END_STREAM, 1, message(b"200 60000"))
    client.sendall(said + call)
    return client


def is_reset(client: socket.socket) -> bool:
    """Returns whether the other side has ended the connection: its state in the kernel is not ESTABLISHED."""
    return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1


async def test_who_is_in_a_queue_that_others_share_is_left_to_them(tmp_path: Path) -> None:
    theirs, ours = os.pipe()
    with bind_listener("127.0.0.1", 0) as listening, contextlib.ExitStack() as clients:
        for _ in range(50):
            clients.enter_context(socket.create_connection(listening.getsockname()))
        os.close(ours)
        loop = GrpcListener(listening.dup(), theirs, str(tmp_path / "none"), 100, None, 2, is_shared=True)
        await asyncio.to_thread(loop.run)
        left = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                listening.accept()[0].close()
                left += 1
    os.close(theirs)
    assert left == 50


async def test_who_is_in_the_queue_when_the_listener_leaves_is_served(tmp_path: Path) -> None:
    listening, (theirs, ours) = bind_listener("127.0.0.1", 0), os.pipe()
    listening.setblocking(False)
    clients = [socket.create_connection(listening.getsockname()) for _ in range(50)]
    os.write(ours, listener.LEAVE)
    loop = GrpcListener(listening, theirs, str(tmp_path / "none"), 100, None, 2)
    running = asyncio.create_task(asyncio.to_thread(loop.run))
    try:
        await asyncio.sleep(0.5)
        for client in clients:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)
    finally:
        for client in clients:
            client.close()
        os.close(ours)
        await running
        os.close(theirs)


@pytest.mark.parametrize(
    ("stuck_s", "is_left", "is_late"), [(4.0, True, False), (6.0, True, True), (6.0, False, False), (61.0, False, True)]
)
def test_who_takes_nothing_has_less_time_after_the_router(stuck_s: float, is_left: bool, is_late: bool) -> None:
    class Stuck:
        stage = ConnectionStage.OPEN
        headers_since_s = None

        def stuck_s(self) -> float:
            return stuck_s

    connection = Stuck()
    connection.is_left = is_left  # type: ignore[attr-defined]
    loop = GrpcListener(socket.socket(), 0, "", 1, None, 2)
    loop._listening.close()
    assert loop._is_late(cast("ClientConnection", connection)) == is_late
    loop._selector.close()


def test_who_has_called_since_the_last_look_is_not_the_next_to_make_room() -> None:
    class Idle:
        has_calls = False
        is_closed = False
        cost = SimpleNamespace(useful_calls=0)

        def __init__(self, idle_since_s: float) -> None:
            self.idle_since_s = idle_since_s

        def stuck_s(self) -> float:
            return 0.0

        def close(self) -> None:
            self.is_closed = True
            loop.closed(cast("ClientConnection", self))

    loop = GrpcListener(socket.socket(), 0, "", 3, None, 2)
    loop._listening.close()
    first, calls, silent, late = (Idle(loop.now_s() + number - 4) for number in range(4))
    loop._connections |= dict.fromkeys(cast("list[ClientConnection]", [first, calls, silent, late]))
    loop._make_room()
    assert first.is_closed
    calls.idle_since_s = loop.now_s() + 0.1
    loop._make_room()
    assert silent.is_closed
    assert not calls.is_closed
    loop._selector.close()


# Honest clients


async def test_a_thousand_calls_at_once_on_one_connection_are_all_answered() -> None:
    async with served() as server, grpc.aio.insecure_channel(server.address, options=ALONE) as channel:
        echo, body = channel.unary_unary(f"/{SERVICE}/Echo"), b"x" * 5000
        assert set(await asyncio.gather(*(echo(body, timeout=PATIENCE_S) for _ in range(1000)))) == {body}
        assert not server.cuts


async def test_calls_that_are_cancelled_after_their_first_message_are_no_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_cost, "FIRST_CREDIT", 400)
    async with served() as server, grpc.aio.insecure_channel(server.address, options=ALONE) as channel:
        for _ in range(200):
            call = channel.unary_stream(f"/{SERVICE}/Stream")(b"100000", timeout=PATIENCE_S)
            await call.read()
            call.cancel()
        await echoed(server.address)
        assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_large_messages_pass_both_ways() -> None:
    async with served() as server:
        await echoed(server.address, bytes(range(256)) * (30 << 12))


async def test_a_long_stream_with_a_ping_for_each_message_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_cost, "FIRST_CREDIT", 400)
    async with served() as server, connected(server.address) as (reader, writer):
        call = message(b"5000")
        writer.write(frame(HEADERS, END_HEADERS, 1, fields("Stream")) + frame(DATA, END_STREAM, 1, call))
        messages = 0
        async with asyncio.timeout(PATIENCE_S):
            while True:
                kind, flags, stream, payload = await next_frame(reader)
                assert kind != GOAWAY, payload
                if kind == DATA:
                    messages += payload.count(message(b"")[:1] + struct.pack(">I", 60))
                    opened = frame(WINDOW, payload=struct.pack(">I", len(payload)))
                    opened += frame(WINDOW, 0, 1, struct.pack(">I", len(payload)))
                    writer.write(opened + frame(PING, payload=struct.pack(">Q", messages)))
                if kind == HEADERS and stream == 1 and flags & END_STREAM:
                    break
        assert messages == 5000


async def test_a_large_answer_through_a_small_window_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kilobyte at a time."""
    monkeypatch.setattr(connection_cost, "FIRST_CREDIT", 400)
    body, small = bytes(60_000), struct.pack(">HI", 4, 1024)
    async with served() as server, connected(server.address, small) as (reader, writer):
        for n in range(1, 40, 2):
            writer.write(frame(HEADERS, END_HEADERS, n, fields("Echo")))
            said = message(body)
            for at in range(0, len(said), 16_000):
                last = END_STREAM if at + 16_000 >= len(said) else 0
                writer.write(frame(DATA, last, n, said[at : at + 16_000]))
            got = 0
            async with asyncio.timeout(PATIENCE_S):
                while got < len(said):
                    kind, _, stream, payload = await next_frame(reader)
                    assert kind != GOAWAY, payload
                    if kind == DATA:
                        assert stream == n
                        got += len(payload)
                        writer.write(frame(WINDOW, 0, n, struct.pack(">I", len(payload))))
                        writer.write(frame(WINDOW, payload=struct.pack(">I", len(payload))))


async def test_the_router_is_told_whose_connection_it_is() -> None:
    async with served() as server:
        await echoed(server.address)
        assert server.calls.hosts == {"127.0.0.1"}


async def test_health_is_watched_through_it() -> None:
    async with served() as server, grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="ready"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.server.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


# Who makes room


async def test_connections_that_were_of_no_use_make_room_for_others() -> None:
    async with served(most=4) as server, grpc.aio.insecure_channel(server.address, options=ALONE) as channel:
        echo = channel.unary_unary(f"/{SERVICE}/Echo")
        assert await echo(b"a", timeout=PATIENCE_S) == b"a"
        async with contextlib.AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(connected(server.address)) for _ in range(9)]
            async with asyncio.timeout(PATIENCE_S):
                for reader, _ in silent[:6]:
                    with contextlib.suppress(ConnectionError):
                        while await reader.read(1 << 16):
                            pass
            await echoed(server.address)
            assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_who_does_not_come_to_the_end_of_the_preface_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "ARRIVAL_S", 0.2)
    async with served() as server:
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        writer.write(PREFACE[:10])
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()


async def test_other_protocols_are_closed_at_once() -> None:
    async with served() as server:
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        writer.write(b"GET /live HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_server_that_stops_takes_no_more_clients_and_ends_the_calls_that_it_has() -> None:
    async with served() as server, grpc.aio.insecure_channel(server.address, options=ALONE) as channel:
        call = channel.unary_stream(f"/{SERVICE}/Stream")(b"3000", timeout=PATIENCE_S)
        messages = aiter(call)
        assert await anext(messages) == b"%060d" % 0
        stopping = asyncio.create_task(server.server.stop(PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S):
            while await is_taken(server.address):
                await asyncio.sleep(0.01)
        assert len([each async for each in messages]) == 2999
        await stopping


async def is_taken(address: str) -> bool:
    try:
        _, writer = await asyncio.open_connection(*address.split(":"))
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_calls_that_grpc_ignores_keep_nobody_out() -> None:
    """Clients open odd streams; an even one is never answered, so a connection with one would always be busy."""
    async with served(most=4) as server, contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            _, writer = await stack.enter_async_context(connected(server.address))
            writer.write(frame(HEADERS, END_HEADERS, 2, fields("Stall")))
        await asyncio.sleep(0.3)
        assert server.calls.seen == []
        async with asyncio.timeout(15):
            await echoed(server.address)


async def test_room_for_many_newcomers_costs_few_looks_at_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = Counter[str](), ClientConnection.stuck_s

    def counted(connection: ClientConnection) -> float:
        looks["at a connection"] += 1
        return look(connection)

    async with served(most=50) as server, contextlib.AsyncExitStack() as stack:
        for _ in range(50):
            await stack.enter_async_context(connected(server.address))
        monkeypatch.setattr(ClientConnection, "stuck_s", counted)
        for _ in range(150):
            await stack.enter_async_context(connected(server.address))
        await echoed(server.address)
    assert looks["at a connection"] < 150 * 50 / 3


async def test_the_listener_may_be_ended_twice_at_the_same_time() -> None:
    """Each of several stops of one server ends it."""
    async with served() as server:
        await echoed(server.address)
        ends = [asyncio.create_task(server.listener.end())]
        while not ends[0].done():
            await asyncio.sleep(0)
            ends.append(asyncio.create_task(server.listener.end()))
        await asyncio.gather(*ends)
