"""Hostile clients at the HTTP port below the level of requests: connections, heads, bodies and how they come."""

from __future__ import annotations

import asyncio
import socket

from tests.trials.chaos.neighbours.target import Play, Table
from tests.trials.chaos.neighbours.wire import (
    chat,
    completion,
    dialled,
    endpoint,
    exchange,
    head,
    http_client,
    post,
    tls,
)

TABLE = Table("HTTP")
BYTE_CHUNK = b"1\r\nx\r\n"
CHATS = "/v1/chat/completions"


@TABLE.entry(key=False)
async def one_byte_chunks_of_a_refused_request(play: Play) -> None:
    """Bodies in chunks of one byte for a request that was refused, on 8 connections (22)."""
    begin = head(play, "POST", "/v1/completions", {"Transfer-Encoding": "chunked"}, key="ts-0-wrong") + b"\r\n"
    flood = BYTE_CHUNK * 8192
    await _pour(play, begin, flood, 8)


@TABLE.entry(key=True)
async def one_byte_chunks_of_a_good_request(play: Play) -> None:
    """The same with a key: a prompt whose body comes in chunks of one byte."""
    body = completion(play, "x" * 100_000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    request = head(play, "POST", "/v1/completions", {"Transfer-Encoding": "chunked"}) + b"\r\n" + chunks
    await play.repeat(lambda: exchange(play, request), 4)


@TABLE.entry(key=False)
async def chunks_to_a_path_that_is_not_there(play: Play) -> None:
    """An endless body to a path that does not exist."""
    begin = head(play, "POST", "/nowhere", {"Transfer-Encoding": "chunked"}) + b"\r\n"
    flood = BYTE_CHUNK * 8192
    await _pour(play, begin, flood, 8)


@TABLE.entry(key=False)
async def long_chunk_extensions(play: Play) -> None:
    """Chunks whose extensions are longer than they are."""
    begin = head(play, "POST", CHATS, {"Transfer-Encoding": "chunked"}) + b"\r\n"
    flood = (b"1;" + b"e" * 4000 + b"\r\nx\r\n") * 16
    await _pour(play, begin, flood, 4)


@TABLE.entry(key=False)
async def slow_heads(play: Play) -> None:
    """Opens as many connections as are allowed, each a header's character now and then."""
    await _drip(play, head(play, "POST", CHATS), b"X-Slow: 1\r\n")


@TABLE.entry(key=True)
async def unfinished_bodies(play: Play) -> None:
    """Sends as many requests with a key as there may be connections, whose bodies do not end (26)."""
    begin = head(play, "POST", CHATS, {"Content-Length": "100000", "Content-Type": "application/json"}) + b"\r\n{"
    await _drip(play, begin, b" ")


@TABLE.entry(key=True)
async def unfinished_chunked_bodies(play: Play) -> None:
    """The same with bodies in chunks."""
    begin = head(play, "POST", CHATS, {"Transfer-Encoding": "chunked"}) + b"\r\n"
    await _drip(play, begin, b"1\r\n \r\n")


async def _pour(play: Play, begin: bytes, flood: bytes, connections: int) -> None:
    async def attempt() -> None:
        async with http_client(play) as (_, writer):
            writer.write(begin)
            while play.left_s:
                writer.write(flood)
                await writer.drain()
                await play.pace()

    await play.repeat(attempt, connections)


async def _drip(play: Play, begin: bytes, drop: bytes) -> None:
    async def attempt() -> None:
        async with http_client(play) as (reader, writer):
            writer.write(begin)
            while play.left_s and not reader.at_eof():
                writer.write(drop)
                await writer.drain()
                await asyncio.sleep(0.5)

    await play.repeat(attempt, play.target.most_connections + 5)


@TABLE.entry(key=False)
async def connections_that_say_nothing(play: Play) -> None:
    """Twice as many connections as are allowed, silent."""

    async def attempt() -> None:
        async with http_client(play) as (reader, _):
            await reader.read(1)
            await asyncio.sleep(0.05)

    await play.repeat(attempt, 2 * play.target.most_connections)


@TABLE.entry(key=False)
async def slow_handshakes(play: Play) -> None:
    """The first bytes of a TLS handshake, and no more, on as many connections as are allowed."""

    async def attempt() -> None:
        async with dialled(play.target.http) as (reader, writer):
            writer.write(b"\x16\x03\x01\x02\x00\x01\x00")
            await reader.read(1)
            await asyncio.sleep(0.05)

    await play.repeat(attempt, play.target.most_connections + 5)


@TABLE.entry(key=False)
async def handshakes_in_a_loop(play: Play) -> None:
    """Connections (with TLS: handshakes) as fast as they go, each closed at once."""

    async def attempt() -> None:
        async with http_client(play):
            pass

    await play.repeat(attempt, 8)


@TABLE.entry(key=False)
async def garbage_instead_of_requests(play: Play) -> None:
    """Random bytes on fresh connections."""

    async def attempt() -> None:
        async with dialled(play.target.http) as (reader, writer):
            writer.write(play.draw.randbytes(4096))
            await writer.drain()
            await reader.read(4096)

    await play.repeat(attempt, 8)


@TABLE.entry(key=False)
async def http2_at_the_http_port(play: Play) -> None:
    """The preface of HTTP/2, and frames, where HTTP/1.1 is spoken."""

    async def attempt() -> None:
        async with http_client(play) as (reader, writer):
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 9000)
            await writer.drain()
            await reader.read(4096)

    await play.repeat(attempt, 8)


@TABLE.entry(key=False)
async def half_closed_sockets(play: Play) -> None:
    """Requests whose connections are closed for writing as soon as they are sent."""
    request = post(play, CHATS, chat(play, stream=True))

    async def attempt() -> None:
        async with http_client(play) as (reader, writer):
            writer.write(request)
            if writer.can_write_eof():
                writer.write_eof()
            while await reader.read(1 << 16):
                pass

    await play.repeat(attempt, 8)


@TABLE.entry(key=True)
async def resets_in_the_middle_of_answers(play: Play) -> None:
    """Streams that are reset after their first bytes, in a loop."""
    request = post(play, CHATS, chat(play, stream=True, max_tokens=500))

    async def attempt() -> None:
        async with http_client(play) as (reader, writer):
            writer.write(request)
            await reader.read(300)

    await play.repeat(attempt, 8)


@TABLE.entry(key=False)
async def ten_thousand_small_requests_at_once(play: Play) -> None:
    """Small requests, thousands in one write, answers read as they come (pipelining)."""
    flood = (head(play, "GET", "/live") + b"\r\n") * 10_000

    async def attempt() -> None:
        async with http_client(play) as (reader, writer):
            writer.write(flood)
            while part := await reader.read(1 << 16):
                del part
                await play.pace()

    await play.repeat(attempt, 2)


@TABLE.entry(key=False)
async def requests_whose_answers_nobody_reads(play: Play) -> None:
    """The same, and nothing of the answers is read."""
    flood = (head(play, "GET", "/metrics") + b"\r\n") * 1000

    async def attempt() -> None:
        async with http_client(play, receive_bytes=4096) as (_, writer):
            writer.write(flood)
            await play.hold()

    await play.repeat(attempt, 4)


@TABLE.entry(key=True)
async def streams_that_nobody_reads(play: Play) -> None:
    """Long streams with log probabilities, of which nothing is read."""
    request = post(play, CHATS, chat(play, stream=True, max_tokens=2000, logprobs=True, top_logprobs=20))

    async def attempt() -> None:
        async with http_client(play, receive_bytes=4096) as (_, writer):
            writer.write(request)
            await play.hold()

    await play.repeat(attempt, 8)


@TABLE.entry(key=False)
async def floods_of_headers(play: Play) -> None:
    """Requests with 60 KiB of short headers."""
    request = head(play, "GET", "/live", {f"x-{number}": "y" for number in range(5000)}) + b"\r\n"
    await play.repeat(lambda: exchange(play, request), 4)


@TABLE.entry(key=False)
async def endless_heads(play: Play) -> None:
    """Heads that go on beyond every limit."""
    begin, more = head(play, "GET", "/live"), b"X-More: " + b"y" * 8000 + b"\r\n"

    async def attempt() -> None:
        async with http_client(play) as (_, writer):
            writer.write(begin)
            for _ in range(100):
                writer.write(more)
                await writer.drain()

    await play.repeat(attempt, 4)


@TABLE.entry(key=False)
async def odd_methods(play: Play) -> None:
    """OPTIONS, HEAD, TRACE, CONNECT and methods that do not exist, everywhere."""
    paths = ("/", "/live", "/v1/models", CHATS, "/tokenize", "/metrics", "*", "http://elsewhere/")

    async def attempt() -> None:
        method = play.draw.choice(("OPTIONS", "HEAD", "TRACE", "CONNECT", "DELETE", "PATCH", "BREW", "get"))
        await exchange(play, head(play, method, play.draw.choice(paths), {"Connection": "close"}) + b"\r\n")

    await play.repeat(attempt, 4)


@TABLE.entry(key=True)
async def expected_continues(play: Play) -> None:
    """`Expect: 100-continue` and no body after it."""
    expects = {"Expect": "100-continue", "Content-Length": "1000"}
    request = head(play, "POST", CHATS, expects) + b"\r\n"

    async def attempt() -> None:
        async with http_client(play) as (reader, writer):
            writer.write(request)
            await reader.read(4096)
            await asyncio.sleep(0.2)

    await play.repeat(attempt, 20)


@TABLE.entry(key=False)
async def upgrades(play: Play) -> None:
    """Requests to become a WebSocket, or HTTP/2 without TLS."""
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "HTTP2-Settings": "AAMAAABk"}
    websocket = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}

    async def attempt() -> None:
        protocol = play.draw.choice(("websocket", "h2c"))
        request = head(play, "GET", CHATS, upgrade | websocket | {"Upgrade": protocol}) + b"\r\n"
        await exchange(play, request)

    await play.repeat(attempt, 4)


@TABLE.entry(key=False)
async def two_lengths(play: Play) -> None:
    """`Transfer-Encoding` together with `Content-Length`, and a second request hidden in the body (30)."""
    hidden = head(play, "GET", "/live") + b"\r\n"
    lengths = {"Transfer-Encoding": "chunked", "Content-Length": str(5 + len(hidden))}
    request = head(play, "POST", CHATS, lengths) + b"\r\n0\r\n\r\n" + hidden
    await play.repeat(lambda: exchange(play, request), 4)


@TABLE.entry(key=True)
async def key_guessing(play: Play) -> None:
    """A key after the other, none of them good."""

    async def attempt() -> None:
        guess = f"ts-{play.draw.randbytes(6).hex()}-{play.draw.randbytes(32).hex()}"
        await exchange(play, post(play, CHATS, chat(play), key=guess))

    await play.repeat(attempt, 4)


@TABLE.entry(key=False, port="metrics")
async def metrics_in_a_loop(play: Play) -> None:
    """Scrapes one after the other, eight at once."""
    request = head(play, "GET", "/metrics", {"Connection": "close"}) + b"\r\n"

    async def attempt() -> None:
        context = tls(play.target) if play.target.metrics == play.target.http else None
        async with dialled(play.target.metrics, context) as (reader, writer):
            writer.write(request)
            while await reader.read(1 << 16):
                pass

    await play.repeat(attempt, 8)


@TABLE.entry(key=False, port="worker metrics")
async def scrapers_of_workers_that_do_not_read(play: Play) -> None:
    """A hundred scrapers at each worker's metrics port, which read nothing."""
    request = head(play, "GET", "/metrics") + b"\r\n"

    async def attempt() -> None:
        async with dialled(play.draw.choice(play.target.worker_metrics), receive_bytes=4096) as (reader, writer):
            writer.write(request)
            await asyncio.sleep(1.0)
            await reader.read(1)

    await play.repeat(attempt, 100)


@TABLE.entry(key=False)
async def urgent_bytes(play: Play) -> None:
    """Out-of-band data in the middle of heads."""

    async def attempt() -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as plain:
            plain.setblocking(False)
            await loop.sock_connect(plain, endpoint(play.target.http))
            for byte in b"GET /live HTTP/1.1\r\n":
                plain.send(bytes((byte,)), socket.MSG_OOB)
            await asyncio.sleep(0.05)

    await play.repeat(attempt, 8)
