"""Clients that keep connections without using them, over real sockets; and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from router import http_protocol
from router.http_server import HttpServer, http_config
from router.listener import bind_listener
from router.server import _client_options
from tests.unit.router.conftest import open_doors
from twostroke.doors_config import DoorsConfig
from twostroke.errors import ConfigError
from twostroke.request import SampledToken
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

REQUEST = b"GET /live HTTP/1.1\r\nHost: router\r\n\r\n"


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class App:
    """Answers at once, or without end and with how it ended."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/endless":
            await PlainTextResponse("answer")(scope, receive, send)
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


@asynccontextmanager
async def listening(most_connections: int = 100) -> AsyncIterator[tuple[App, Connect]]:
    """Connections are closed at the end."""
    app, listener = App(), bind_listener("127.0.0.1", 0)
    server = HttpServer(http_config(app, grace_s=0, most_connections=most_connections))
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
        async with asyncio.timeout(20):
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
        async with asyncio.timeout(20):
            await app.gone.wait()


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
    ages = dict(_client_options(DoorsConfig(max_connection_age_s=77)))
    assert ages["grpc.max_connection_age_ms"] == 77_000
    async with open_doors(DoorsConfig(max_connection_age_s=1)) as doors:
        doors.dispatcher.script = lambda request, index: [SampledToken(65)] * 150

        async def slowly(request: inference_pb2.GenerateRequest) -> AsyncIterator[int]:
            async for message in inference_pb2_grpc.InferenceStub(doors.channel).Generate(request):
                await asyncio.sleep(0.01)
                yield len(message.token_ids)

        states: list[grpc.ChannelConnectivity] = []

        async def follow() -> None:
            while True:
                states.append(doors.channel.get_state())
                await doors.channel.wait_for_state_change(states[-1])

        following = asyncio.create_task(follow())
        stop = inference_pb2.StopOptions(max_tokens=150, ignore_eos=True)
        request = inference_pb2.GenerateRequest(text="a", stop=stop)
        assert sum([count async for count in slowly(request)]) == 150
        assert grpc.ChannelConnectivity.IDLE in states[states.index(grpc.ChannelConnectivity.READY) :]
        following.cancel()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_connections": 0}, "--max-connections must be 1 or more"),
        ({"max_request_bytes": 0}, "--max-request-bytes must be 1 or more"),
        ({"max_connection_age_s": 0.0}, "--max-connection-age must be seconds from 1"),
    ],
)
def test_limits_that_let_nobody_in_are_refused(wrong: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DoorsConfig(**wrong)  # type: ignore[arg-type]  # one of its fields
