"""Parts of a streamed body are written at once where the connection lets them, and through `send` where it does not. An
application that asks for it ends with its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.http_server.exchange import EXCHANGE, Exchange


class Wire:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_writable = True
        self.has_ended = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    async def writable(self) -> None: ...

    def body_wanted(self) -> None: ...

    def response_ended(self, exchange: Exchange) -> None:
        self.has_ended = True

    def abort(self) -> None: ...


def part(data: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def streamed(wire: Wire, use: Callable[[Exchange], None], **scope: str) -> None:
    """Stream a body over `wire`; `use` has the extension in the middle of it."""

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        parts: Exchange = scope["extensions"][EXCHANGE]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert not parts.takes_parts, "the head goes first"
        await send(part(b"one"))
        use(parts)
        await send(part(b"", more=False))
        assert not parts.takes_parts, "the end was the last"

    whole = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/", **scope}
    exchange = Exchange(wire, whole, ServerState(), keep_alive=True)
    await exchange.run(app)
    assert wire.has_ended


async def test_a_part_is_a_chunk_between_others() -> None:
    wire = Wire()

    def use(parts: Exchange) -> None:
        assert parts.takes_parts
        parts.write_part(b"two")

    await streamed(wire, use)
    assert b"".join(wire.written).partition(b"\r\n\r\n")[2] == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


@pytest.mark.parametrize("scope", [{"http_version": "1.0"}, {"method": "HEAD"}])
async def test_a_body_without_chunks_goes_through_send(scope: dict[str, str]) -> None:
    wire = Wire()

    def use(parts: Exchange) -> None:
        assert not parts.takes_parts

    await streamed(wire, use, **scope)


async def test_a_client_that_takes_nothing_is_waited_for() -> None:
    wire = Wire()

    def use(parts: Exchange) -> None:
        wire.is_writable = False
        assert not parts.takes_parts
        wire.is_writable = True

    await streamed(wire, use)


@pytest.mark.parametrize("has_left", [True, False])
async def test_an_application_that_asks_for_it_is_cancelled_when_its_client_leaves(has_left: bool) -> None:
    whole = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/"}
    exchange, waits = Exchange(Wire(), whole, ServerState(), keep_alive=True), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"][EXCHANGE].end_with_client()
        waits.set()
        await asyncio.Event().wait()

    if has_left:
        exchange.leave()
    task = asyncio.create_task(exchange.run(app))
    await waits.wait()
    exchange.leave()
    (ended,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)
