"""Raw bytes over a real socket: what is not a request, what may be smuggled, and what a refused body costs."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.auth.api_keys import draw_key
from router.http_server import lingering
from router.http_server import protocol as http_protocol
from tests.unit.router.conftest import Frontend, open_frontend
from tests.unit.router.http_server.test_slow_clients import ends, listening
from twostroke.config import EndpointsConfig

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
LIVE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
LAST = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
BODY = b'{"prompt": "a"}'


async def say(url: str, *pieces: bytes) -> bytes:
    """All that is answered, until the server ends the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.01)
    said = await ends(reader)
    writer.close()
    return said


def responses(said: bytes) -> int:
    return len(re.findall(rb"HTTP/1\.1 \d\d\d ", said))


NO_REQUESTS = {
    "length and chunks": HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "a list of lengths": HEAD + b"Content-Length: 3, 4\r\n\r\nabcd",
    "a signed length": HEAD + b"Content-Length: +3\r\n\r\nabc",
    "a huge length": HEAD + b"Content-Length: " + b"9" * 40 + b"\r\n\r\nabc",
    "chunked is not last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding and chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a folded line": HEAD + b"X-A: b\r\n c\r\n\r\n",
    "a folded coding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a bare CR": HEAD + b"X-A: b\rX-B: c\r\n\r\n",
    "a bare LF": HEAD + b"X-A: b\nX-B: c\r\n\r\n",
    "a NUL": HEAD + b"X-A: b\0c\r\n\r\n",
    "no host": b"GET /live HTTP/1.1\r\n\r\n",
    "two hosts": LIVE + b"Host: other\r\n\r\n",
    "chunks in 1.0": b"POST /tokenize HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a signed chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n+1\r\na\r\n0\r\n\r\n",
    "a chunk in hex": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n",
    "a chunk with a longer end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "a chunk that ends in LF": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\na\n0\r\n\r\n",
    "a huge chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\na",
    "a long extension": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;a=" + b"b" * (200 << 10) + b"\r\na\r\n0\r\n\r\n",
    "long trailers": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"x-a: b\r\n" * 30_000 + b"\r\n",
    "tiny chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n",
    "many headers": LIVE + b"x-a: b\r\n" * 300 + b"\r\n",
    "a long header": LIVE + b"x-a: " + b"b" * (70 << 10) + b"\r\n\r\n",
    "a long address": b"GET /" + b"b" * (65 << 10) + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tunnel": b"CONNECT other:80 HTTP/1.1\r\nHost: other:80\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2.0 in a line": b"GET /live HTTP/2.0\r\nHost: a\r\n\r\n",
    "HTTP/0.9": b"GET /live\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("wrong", NO_REQUESTS.values(), ids=NO_REQUESTS)
async def test_what_may_be_read_in_two_ways_is_refused_and_ends_its_connection(wrong: bytes) -> None:
    async with listening() as (_, connect):
        reader, writer = await connect()
        writer.write(wrong.replace(HEAD, b"POST /body HTTP/1.1\r\nHost: localhost\r\n") + LAST)
        said = await ends(reader)
    assert said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ", b"HTTP/1.1 505 ")), said[:100]
    assert responses(said) == 1, "what came behind it is not a request"
    assert b"connection: close" in said


async def test_a_trailer_is_no_header(frontend: Frontend) -> None:
    """A proxy that drops a client's x-tenant-id from the head may let it pass behind the body."""
    chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nx-tenant-id: other\r\n\r\n"
    said = await say(frontend.url, HEAD + chunks % (len(BODY), BODY), LAST)
    assert said.count(b"HTTP/1.1 200") == 2
    assert frontend.dispatcher.parents[0].routing.tenant == "127.0.0.1", "its turns are those of its address"


async def test_a_request_to_change_the_protocol_is_answered_in_this_one_and_is_the_last(frontend: Frontend) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    said = await say(frontend.url, LIVE + upgrade + b"\r\n" + LAST)
    assert responses(said) == said.count(b"HTTP/1.1 200") == 1
    said = await say(frontend.url, HEAD + upgrade + b"Content-Length: %d\r\n\r\n" % len(BODY), BODY + LAST)
    assert responses(said) == said.count(b"HTTP/1.1 200") == 1
    assert len(frontend.dispatcher.requests) == 1


async def test_requests_in_a_row_are_answered_in_a_row(frontend: Frontend) -> None:
    asked = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    said = await say(frontend.url, (LIVE + b"\r\n" + asked) * 3 + LIVE[:20], LIVE[20:] + b"\r\n" + LAST)
    assert said.count(b"HTTP/1.1 200") == 8
    assert len(frontend.dispatcher.requests) == 3


async def test_what_is_wrong_behind_a_request_does_not_spoil_its_answer(frontend: Frontend) -> None:
    said = await say(frontend.url, HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + b"nonsense\r\n\r\n")
    assert responses(said) == said.count(b"HTTP/1.1 200") == 1


async def test_the_old_protocol_is_answered_without_chunks_and_ends(frontend: Frontend) -> None:
    body = b'{"prompt": "a", "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n"
    said = await say(frontend.url, head % len(body) + body)
    assert b"transfer-encoding" not in said
    assert said.endswith(b"data: [DONE]\n\n")


async def test_a_head_or_a_body_in_single_bytes_is_a_request(frontend: Frontend) -> None:
    asked = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    host, port = frontend.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for byte in asked:
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert b"HTTP/1.1 200" in await ends(reader)
    writer.close()


async def test_who_waits_to_be_told_to_send_a_body_is_told(frontend: Frontend) -> None:
    head = HEAD + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    host, port = frontend.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head % len(BODY))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert b"HTTP/1.1 200" in await ends(reader)
    writer.close()
    said = await say(frontend.url, head % (1 << 20))
    assert said.startswith(b"HTTP/1.1 413"), "nobody is told to send what is refused already"


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[tuple[Frontend, bytes]]:
    new = draw_key()
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys: {{{new.id}: {{tenant: acme, sha256: '{new.sha256}'}}}}")
    async with open_frontend(EndpointsConfig(api_keys=str(file), max_connections=8)) as frontend:
        yield frontend, f"Authorization: Bearer {new.key}\r\n".encode()


@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Length: 4000000\r\n\r\n"])
async def test_of_a_refused_body_nothing_is_parsed_and_its_client_sees_the_answer(
    keyed: tuple[Frontend, bytes], framing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = 0
    feed = http_protocol.TimedProtocol.on_body

    def on_body(self: http_protocol.TimedProtocol, body: bytes) -> None:
        nonlocal parsed
        parsed += len(body)
        feed(self, body)

    monkeypatch.setattr(http_protocol.TimedProtocol, "on_body", on_body)
    frontend, _ = keyed
    host, port = frontend.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HEAD + framing + b"1\r\na\r\n" * 600_000)
    async with asyncio.timeout(60):
        await writer.drain()
    said = await ends(reader)
    assert said.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in said
    assert parsed <= http_protocol.SLICE_BYTES
    writer.close()


async def test_a_refused_body_without_end_is_cut_off(
    keyed: tuple[Frontend, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 0.3)
    frontend, _ = keyed
    host, port = frontend.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")

    async def write() -> None:
        while True:
            writer.write(b"1\r\na\r\n" * 1000)
            await writer.drain()
            await asyncio.sleep(0.01)

    async with asyncio.timeout(60):
        with pytest.raises(ConnectionError):
            await write()
    with contextlib.suppress(ConnectionError):
        assert (await reader.read()).startswith(b"HTTP/1.1 401")


async def test_unfinished_bodies_at_the_limit_lock_nobody_out(keyed: tuple[Frontend, bytes]) -> None:
    frontend, key = keyed
    host, port = frontend.url.removeprefix("http://").split(":")
    frontend.dispatcher.stalls = True
    whole = HEAD + key + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    running = await asyncio.open_connection(host, int(port))
    running[1].write(whole)
    async with asyncio.timeout(60):
        await frontend.dispatcher.stalled.wait()
    slow = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
    for _, writer in slow:
        writer.write(HEAD + key + b"Content-Length: 100\r\n\r\n{")
        await asyncio.sleep(0.01)
    frontend.dispatcher.stalls = False
    asked = whole.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    for _ in range(5):
        assert b" 200 OK" in await say(frontend.url, asked)
    assert not running[0].at_eof(), "whoever is answered stays"
    for _, writer in (running, *slow):
        writer.close()


async def test_of_the_slow_bodies_the_one_that_came_least_far_goes_first() -> None:
    async with listening(most_connections=2) as (_, connect):
        (far, far_writer), (slow, slow_writer) = await connect(), await connect()
        for writer in (far_writer, slow_writer):
            writer.write(b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        far_writer.write(bytes(500_000))
        slow_writer.write(b"x")
        await asyncio.sleep(0.2)
        _, writer = await connect()
        assert await ends(slow) == b""
        far_writer.write(bytes(500_000))
        assert b"answer" in await far.readuntil(b"answer")
        writer.close()
