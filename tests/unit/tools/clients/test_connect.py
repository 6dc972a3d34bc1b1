"""Connections of HTTP clients end with their session."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
import warnings
from pathlib import Path

import aiohttp

from cluster.flags.client_credentials import ClientTls
from tests.certificates import Authority, Issued
from tools.clients.connect import connector

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def answer_and_stay(listener: socket.socket, shown: Issued, done: threading.Event) -> None:
    """One request; the server never says goodbye."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.cert, shown.key)
    with context.wrap_socket(listener.accept()[0], server_side=True) as encrypted:
        encrypted.recv(4096)
        encrypted.sendall(ANSWER)
        done.wait(60)


async def ask(port: int, tls: ClientTls) -> str:
    async with (
        aiohttp.ClientSession(connector=connector(tls)) as session,
        session.get(f"https://localhost:{port}/") as response,
    ):
        return await response.text()


def test_one_over_tls_to_which_the_server_does_not_say_goodbye_does_not_outlive_its_loop(tmp_path: Path) -> None:
    authority, done = Authority(tmp_path), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=answer_and_stay, args=(listener, authority.issue("server"), done))
        server.start()
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always", ResourceWarning)
                port = listener.getsockname()[1]
                assert asyncio.run(ask(port, ClientTls(ca=authority.file.read_bytes()))) == "ok"
                gc.collect()
            assert not [str(each.message) for each in told if "transport" in str(each.message)]
        finally:
            done.set()
            server.join()
