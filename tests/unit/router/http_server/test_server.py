"""The HTTP door goes while clients connect to the socket that it shares with its next life."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse

from router.addresses import bind_listener
from router.http_server.server import HttpServer, http_config
from router.shared_memory import RouterMemory, create_router_memory
from tests.certificates import Authority
from twostroke.base.credentials import TlsConfig
from twostroke.security.tls import Certificates, CertificateUse


def http_server(certificates: Certificates | None = None, shared: RouterMemory | None = None) -> HttpServer:
    app = PlainTextResponse("answer")
    return HttpServer(http_config(app, grace_s=0, most_connections=100, certificates=certificates), shared)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("turns", range(4))
async def test_who_connects_while_a_router_leaves_is_answered_by_it_or_by_its_next_life(
    turns: int, is_shared: bool
) -> None:
    """`turns` of the event loop lie between the connection and the order to leave."""
    listener, descriptor = bind_listener("127.0.0.1", 0), create_router_memory()
    leaving, successor = (
        http_server(shared=RouterMemory.inherited(descriptor) if is_shared else None) for _ in range(2)
    )
    serving = [asyncio.create_task(leaving.serve([listener.dup()]))]
    await leaving.is_up.wait()
    client = socket.create_connection(listener.getsockname())
    for _ in range(turns):
        await asyncio.sleep(0)
    left = asyncio.create_task(leaving.leave(10.0))
    await asyncio.sleep(0)
    serving.append(asyncio.create_task(successor.serve([listener.dup()])))
    reader, writer = await asyncio.open_connection(sock=client)
    writer.write(b"GET / HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(60):
        assert (await reader.read()).endswith(b"answer")
        writer.close()
        await writer.wait_closed()
        await left
    for server in (leaving, successor):
        server.should_exit = True
    await asyncio.gather(*serving)
    listener.close()
    os.close(descriptor)


@pytest.mark.parametrize("is_shared", [False, True])
async def test_who_shakes_hands_while_a_router_leaves_is_answered_by_it(tmp_path: Path, is_shared: bool) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("door")
    config = TlsConfig(cert=str(issued.cert), key=str(issued.key))
    descriptor, listener = create_router_memory(), bind_listener("127.0.0.1", 0)
    shared = RouterMemory.inherited(descriptor) if is_shared else None
    server = http_server(Certificates(config, CertificateUse.CLIENTS), shared)
    serving = asyncio.create_task(server.serve([listener.dup()]))
    await server.is_up.wait()
    client = socket.create_connection(listener.getsockname())
    async with asyncio.timeout(60):
        while not server.is_arriving:
            await asyncio.sleep(0.01)
    left = asyncio.create_task(server.leave(10.0))
    await asyncio.sleep(0.2)
    context = ssl.create_default_context(cafile=str(authority.file))
    reader, writer = await asyncio.open_connection(sock=client, ssl=context, server_hostname="localhost")
    writer.write(b"GET / HTTP/1.1\r\nHost: router\r\n\r\n")
    async with asyncio.timeout(60):
        assert (await reader.read()).endswith(b"answer")
        writer.close()
        await left
    server.should_exit = True
    await serving
    listener.close()
    os.close(descriptor)
