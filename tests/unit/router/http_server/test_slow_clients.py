"""Clients that keep connections without using them, over real sockets; and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
import time
import weakref
from asyncio import sslproto
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.addresses import bind_listener
from router.grpc_listener import listener as grpc_listener
from router.http_server import lingering
from router.http_server import protocol as http_protocol
from router.http_server.server import HttpServer, http_config
from router.server import _client_options
from tests.certificates import Authority
from tests.half_calls import half_a_call
from tests.unit.router.conftest import open_frontend
from twostroke.base.credentials import TlsConfig
from twostroke.config import EndpointsConfig
from twostroke.request import SampledToken
from twostroke.rpc import entrance
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc
from twostroke.security.tls import Certificates, CertificateUse

REQUEST = b"GET /live HTTP/1.1\r\nHost: router\r\n\r\n"


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class App:
    """Answers at once, after the whole body, or without end and with how it ended."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.answer = "answer"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/endless":
            while scope["path"] == "/body" and (await receive()).get("more_body"):
                pass
            await PlainTextResponse(self.answer)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        writing = asyncio.create_task(self._write(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        self.gone.set()

    async def _write(self, send: Send) -> None:
        while True:
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            await asyncio.sleep(0)  # sending to who has gone waits for nothing


@asynccontextmanager
async def listening(
    most_connections: int = 100, certificates: Certificates | None = None
) -> AsyncIterator[tuple[App, Connect]]:
    """Connections, plain ones, are closed at the end."""
    app, listener = App(), bind_listener("127.0.0.1", 0)
    server = HttpServer(http_config(app, grace_s=0, most_connections=most_connections, certificates=certificates))
    serving = asyncio.create_task(server.serve([listener]))
    await server.is_up.wait()
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writers.append(writer)
        return reader, writer

    try:
        yield app, connect
    finally:
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        server.should_exit = True
        await serving


async def ends(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection does."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(60):
            while piece := await reader.read(1 << 16):
                said += piece
    return said


async def test_who_does_not_come_to_the_end_of_a_request_is_cut_off_however_he_dawdles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "HEADERS_S", 0.5)
    async with listening() as (_, connect):
        silent, _ = await connect()
        reader, writer = await connect()
        second, second_writer = await connect()
        second_writer.write(REQUEST)
        await second.readuntil(b"answer")
        second_writer.write(b"GET /live HTTP/1.1\r\n")

        async def trickle() -> None:
            writer.write(b"GET /live HTTP/1.1\r\nx-slow: ")
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        assert await ends(silent) == b""
        assert await ends(reader) == b""
        assert await ends(second) == b""
        trickling.cancel()
        kept, kept_writer = await connect()
        for _ in range(2):  # who asks may wait between two requests
            kept_writer.write(REQUEST)
            assert b"200 OK" in await kept.readuntil(b"\r\n")
            await kept.readuntil(b"answer")
            await asyncio.sleep(0.7)


async def test_who_takes_nothing_of_an_answer_is_gone_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "STALL_S", 0.3)
    async with listening() as (app, connect):
        reader, writer = await connect()
        writer.write(b"GET /endless HTTP/1.1\r\nHost: router\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(60):
            await app.gone.wait()


class Wire(asyncio.Transport):
    """What a connection writes to: it notes whether it was cut off."""

    is_aborted = False
    unsent = 0

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: object) -> None:
        """Sends at once."""

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Nothing comes anyway."""

    def resume_reading(self) -> None:
        """Nothing comes anyway."""


async def test_who_takes_a_large_answer_slowly_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole answer is one write: writing resumes only when nearly all of it is taken."""
    monkeypatch.setattr(http_protocol, "STALL_S", 0.05)
    wire = Wire()
    config = http_config(App(), grace_s=0, most_connections=2, certificates=None)
    connection = http_protocol.timed_protocol(2)(config, ServerState(), {})
    connection.connection_made(wire)
    wire.unsent = 10**9
    connection.pause_writing()
    for _ in range(30):
        wire.unsent -= 1
        await asyncio.sleep(0.01)
    assert not wire.is_aborted
    async with asyncio.timeout(60):
        while not wire.is_aborted:
            await asyncio.sleep(0.01)
    connection.connection_lost(None)


def test_room_for_many_newcomers_costs_few_looks_at_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    most, looks, look = 100, Counter[str](), http_protocol.TimedProtocol._behind_s

    def counted(connection: http_protocol.TimedProtocol, now_s: float) -> float:
        looks["at a connection"] += 1
        return look(connection, now_s)

    loop = asyncio.new_event_loop()
    config, state = http_config(App(), grace_s=0, most_connections=most, certificates=None), ServerState()
    kind = http_protocol.timed_protocol(most)
    monkeypatch.setattr(http_protocol.TimedProtocol, "_behind_s", counted)
    monkeypatch.setattr(http_protocol.TimedProtocol, "abort", lambda connection: connection.connection_lost(None))
    for _ in range(4 * most):
        kind(config, state, {}, loop).connection_made(Wire())
    assert len(state.connections) == most
    assert looks["at a connection"] < 3 * most * most / 10
    for connection in list(state.connections):
        connection.connection_lost(None)
    loop.close()


@pytest.mark.parametrize("lingering_ones", [0, 1, 3])
async def test_each_of_many_newcomers_at_once_ends_another_connection(lingering_ones: int) -> None:
    """A connection that is aborted is lost in the next iteration of the loop, when all of them have come."""
    most = 4
    config, state = http_config(App(), grace_s=0, most_connections=most, certificates=None), ServerState()
    kind = http_protocol.timed_protocol(most)
    opened, wires = list[http_protocol.TimedProtocol](), [Wire() for _ in range(3 * most)]
    for wire in wires:
        opened.append(kind(config, state, {}))
        opened[-1].connection_made(wire)
        if len(opened) <= lingering_ones:
            opened[-1].data_received(b"no http\r\n\r\n")
    assert sum(wire.is_aborted for wire in wires) == 2 * most
    assert len(state.connections) == most
    for connection in opened:
        connection.connection_lost(None)


async def test_who_has_asked_since_the_last_look_is_not_the_next_to_make_room() -> None:
    most = 4
    config, state = http_config(App(), grace_s=0, most_connections=most, certificates=None), ServerState()
    kind = http_protocol.timed_protocol(most)
    opened = list[http_protocol.TimedProtocol]()

    def one_more() -> Wire:
        opened.append(kind(config, state, {}))
        wire = Wire()
        opened[-1].connection_made(wire)
        return wire

    for _ in range(most - 1):
        one_more()
    asks = one_more()
    asking = opened[-1]
    while len(opened) < 2 * most - 1:  # the first of these has all looked at
        one_more()
    assert not asks.is_aborted
    asking.data_received(REQUEST)
    async with asyncio.timeout(60):
        while asking.is_served:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # longer than it was idle when all were looked at
    one_more()
    assert not asks.is_aborted
    for connection in opened:
        connection.connection_lost(None)


async def test_who_takes_of_its_answer_again_is_not_cut_off_for_an_earlier_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "STALL_S", 0.05)
    wire = Wire()
    config = http_config(App(), grace_s=0, most_connections=2, certificates=None)
    connection = http_protocol.timed_protocol(2)(config, ServerState(), {})
    connection.connection_made(wire)
    for _ in range(3):
        connection.pause_writing()
        connection.resume_writing()
    await asyncio.sleep(0.15)
    assert not wire.is_aborted
    connection.pause_writing()
    async with asyncio.timeout(60):
        while not wire.is_aborted:
            await asyncio.sleep(0.01)
    connection.connection_lost(None)


async def test_an_answer_may_take_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADERS_S", 0.3)
    async with listening() as (app, connect):
        reader, writer = await connect()
        writer.write(b"GET /endless HTTP/1.1\r\nHost: router\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        ends_s = time.monotonic() + 0.6
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.6):
                while time.monotonic() < ends_s and await reader.read(1 << 20):
                    pass
        assert not app.gone.is_set()
        assert await reader.read(1) != b""


async def test_one_connection_too_many_ends_the_one_that_waits_longest() -> None:
    async with listening(most_connections=2) as (app, connect):
        busy, busy_writer = await connect()
        busy_writer.write(b"GET /endless HTTP/1.1\r\nHost: router\r\n\r\n")
        await busy.readuntil(b"\r\n\r\n")
        idle, _ = await connect()
        asks, asks_writer = await connect()
        asks_writer.write(REQUEST)
        assert await ends(idle) == b""
        assert b"200 OK" in await asks.readuntil(b"\r\n")
        assert not app.gone.is_set()


async def test_grpc_clients_connect_again_after_a_while_and_their_streams_go_on() -> None:
    ages = dict(_client_options(EndpointsConfig(max_connection_age_s=77)))
    assert ages["grpc.max_connection_age_ms"] == 77_000
    async with open_frontend(EndpointsConfig(max_connection_age_s=1)) as frontend:
        frontend.dispatcher.script = lambda request, index: [SampledToken(65)] * 150

        async def slowly(request: inference_pb2.GenerateRequest) -> AsyncIterator[int]:
            async for message in inference_pb2_grpc.InferenceStub(frontend.channel).Generate(request):
                await asyncio.sleep(0.01)
                yield len(message.token_ids)

        states: list[grpc.ChannelConnectivity] = []

        async def follow() -> None:
            while True:
                states.append(frontend.channel.get_state())
                await frontend.channel.wait_for_state_change(states[-1])

        following = asyncio.create_task(follow())
        stop = inference_pb2.StopOptions(max_tokens=150, ignore_eos=True)
        request = inference_pb2.GenerateRequest(text="a", stop=stop)
        assert sum([count async for count in slowly(request)]) == 150
        assert grpc.ChannelConnectivity.IDLE in states[states.index(grpc.ChannelConnectivity.READY) :]
        following.cancel()


def tls_endpoint(folder: Path) -> tuple[Certificates, ssl.SSLContext]:
    """Returns the router's certificates, and what a client believes."""
    authority = Authority(folder)
    issued = authority.issue("door")
    certificates = Certificates(TlsConfig(cert=str(issued.cert), key=str(issued.key)), CertificateUse.CLIENTS)
    return certificates, ssl.create_default_context(cafile=str(authority.file))


async def test_over_tls_those_who_do_not_shake_hands_are_no_more_and_stay_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http_server.server.HEADERS_S", 1.5)
    certificates, context = tls_endpoint(tmp_path)
    async with listening(2, certificates) as (_, connect):
        (first, _), (second, second_writer), (third, _) = [await connect() for _ in range(3)]
        assert await ends(first) == b"", "one too many: the oldest goes"
        await second_writer.start_tls(context, server_hostname="localhost")
        second_writer.write(REQUEST)
        assert b"200 OK" in await second.readuntil(b"answer")
        assert await ends(third) == b"", "its time is over"
        fourth, fourth_writer = await connect()
        fourth_writer.write(REQUEST)
        assert b"HTTP" not in await ends(fourth), "plain where it must not be"


async def test_connections_over_tls_leave_no_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a quarter of a megabyte, and the collector seldom comes."""
    left: weakref.WeakSet[SSLProtocol] = weakref.WeakSet()

    class Watched(SSLProtocol):
        def __init__(self, *made_of: Any, **options: Any) -> None:
            super().__init__(*made_of, **options)
            if self._server_side:  # type: ignore[attr-defined]
                left.add(self)

    monkeypatch.setattr(sslproto, "SSLProtocol", Watched)
    certificates, context = tls_endpoint(tmp_path)
    async with listening(100, certificates) as (_, connect):
        gc.disable()
        try:
            _, silent = await connect()
            reader, cut_off = await connect()
            await cut_off.start_tls(context, server_hostname="localhost")
            cut_off.write(REQUEST)
            await reader.readuntil(b"answer")
            assert len(left) == 2
            silent.transport.abort()
            cut_off.transport.abort()
            async with asyncio.timeout(60):
                while left:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_who_is_not_let_in_or_does_not_come_to_the_end_of_a_message_has_no_memory_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = ["/twostroke.v1.Inference/Generate", "/twostroke.v1.Inference/Abort", "/grpc.health.v1.Health/Check"]
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    monkeypatch.setattr(entrance, "OPEN_MESSAGE_S", 0.2)
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: {}")
    async with open_frontend(EndpointsConfig(api_keys=str(keys))) as frontend:
        for method in (*methods, reflection):
            said, writer = await half_a_call(frontend.grpc_address, method)
            assert (b"an API key is needed" in said) == ("Inference" in method), method
            writer.close()
    monkeypatch.setattr(entrance, "MESSAGE_S", 0.2)
    async with open_frontend(EndpointsConfig()) as frontend:
        for method in methods:
            said, writer = await half_a_call(frontend.grpc_address, method)
            assert b"did not arrive" in said, method
            writer.close()


async def test_grpc_connections_that_say_nothing_make_room_for_those_that_call() -> None:
    async with open_frontend(EndpointsConfig(max_connections=3)) as frontend:
        stub = inference_pb2_grpc.InferenceStub(frontend.channel)
        assert [message async for message in stub.Generate(inference_pb2.GenerateRequest(text="a"))]
        silent = [await asyncio.open_connection(*frontend.grpc_address.split(":")) for _ in range(6)]
        ending = [asyncio.create_task(ends(reader)) for reader, _ in silent]
        while sum(task.done() for task in ending) < 4:  # which four is open: they came at once
            await asyncio.wait([task for task in ending if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        later = [await asyncio.open_connection(*frontend.grpc_address.split(":")) for _ in range(2)]
        await asyncio.gather(*ending)
        assert frontend.channel.get_state() is grpc.ChannelConnectivity.READY, "it has called, and stays"
        assert [message async for message in stub.Generate(inference_pb2.GenerateRequest(text="a"))]
        for _, writer in (*silent, *later):
            writer.close()


async def test_grpc_connections_that_do_not_shake_hands_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_listener, "ARRIVAL_S", 0.5)
    async with open_frontend(EndpointsConfig()) as frontend:
        reader, writer = await asyncio.open_connection(*frontend.grpc_address.split(":"))
        await ends(reader)
        writer.close()


async def test_who_sends_more_than_its_last_request_may_be_slow_to_take_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lingering, "LINGER_SILENCE_S", 0.05)
    begins, ends_head = b"POST /body HTTP/1.1\r\nHost: a\r\nConnection: close\r\n", b"Content-Length: 3000\r\n\r\n"
    padding = http_protocol.SLICE_BYTES - len(begins) - len(ends_head) - len(b"X: \r\n") - 3000
    async with listening() as (app, connect):
        app.answer = "x" * (32 << 20)  # more than the system takes for a client that reads nothing
        reader, writer = await connect()
        writer.write(begins + b"X: " + b"x" * padding + b"\r\n" + ends_head + b"x" * 3000 + b"\r\n")
        await asyncio.sleep(0.5)
        taken = 0
        async with asyncio.timeout(60):
            while piece := await reader.read(1 << 20):
                taken += len(piece)
        assert taken > 32 << 20
        writer.close()
