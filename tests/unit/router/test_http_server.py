"""The HTTP door goes while clients connect to the socket that it shares with its next life."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.responses import PlainTextResponse

from router.http_server import HttpServer, http_config
from router.listener import bind_listener


def http_server() -> HttpServer:
    return HttpServer(http_config(PlainTextResponse("answer"), grace_s=0, most_connections=100))


@pytest.mark.parametrize("turns", range(4))
async def test_who_connects_while_a_router_leaves_is_answered_by_it_or_by_its_next_life(turns: int) -> None:
    """`turns` of the event loop lie between the connection and the order to leave."""
    listener = bind_listener("127.0.0.1", 0)
    leaving, next_life = http_server(), http_server()
    serving = [asyncio.create_task(leaving.serve([listener.dup()]))]
    await leaving.is_up.wait()
    client = socket.create_connection(listener.getsockname())
    for _ in range(turns):
        await asyncio.sleep(0)
    left = asyncio.create_task(leaving.leave(10.0))
    await asyncio.sleep(0)
    serving.append(asyncio.create_task(next_life.serve([listener.dup()])))
    reader, writer = await asyncio.open_connection(sock=client)
    writer.write(b"GET / HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(10):
        assert (await reader.read()).endswith(b"answer")
        writer.close()
        await writer.wait_closed()
        await left
    for server in (leaving, next_life):
        server.should_exit = True
    await asyncio.gather(*serving)
    listener.close()
