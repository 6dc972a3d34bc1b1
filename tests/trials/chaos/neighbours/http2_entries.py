"""Hostile clients at the gRPC port below the level of calls: frames of HTTP/2, and connections."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

from tests.trials.chaos.neighbours.target import Play, Table
from tests.trials.chaos.neighbours.wire import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST,
    SETTINGS,
    WINDOW,
    call_headers,
    dialled,
    field,
    frame,
    http2,
    message,
    tls,
)

TABLE = Table("gRPC")
GENERATE = "/twostroke.v1.Inference/Generate"
CHECK = "/grpc.health.v1.Health/Check"
NO_WINDOW = struct.pack(">HI", 4, 0)
"""The setting that lets the server send nothing on a stream."""
STREAMS = range(1, 1 << 30, 2)


async def _flood(play: Play, piece: Callable[[int], bytes], connections: int = 4) -> None:
    """Frames without end; `piece`: of the n-th stream."""

    async def attempt() -> None:
        async with http2(play) as (_, writer):
            for stream in STREAMS:
                writer.write(piece(stream))
                if stream % 64 == 1:
                    await writer.drain()
                    await play.pace()
                if not play.left_s:
                    return

    await play.repeat(attempt, connections)


@TABLE.entry(key=False)
async def rapid_resets(play: Play) -> None:
    """Calls that are reset as soon as they have begun."""
    fields, cancel = call_headers(play, GENERATE), struct.pack(">I", 8)
    await _flood(play, lambda n: frame(HEADERS, END_HEADERS, n, fields) + frame(RST, 0, n, cancel))


@TABLE.entry(key=False)
async def calls_without_an_end(play: Play) -> None:
    """Calls that are begun, a thousand on each connection, and never finished."""
    fields = call_headers(play, GENERATE)

    async def attempt() -> None:
        async with http2(play) as (_, writer):
            for number in range(1000):
                writer.write(frame(HEADERS, END_HEADERS, 2 * number + 1, fields))
            await writer.drain()
            await play.hold()

    await play.repeat(attempt, 4)


@TABLE.entry(key=False)
async def continuations(play: Play) -> None:
    """Headers that go on in one CONTINUATION frame after the other."""
    more = frame(CONTINUATION, 0, 1, field("x-more", "y" * 100) * 10)

    async def attempt() -> None:
        async with http2(play) as (_, writer):
            writer.write(frame(HEADERS, 0, 1, call_headers(play, CHECK)))
            while play.left_s:
                writer.write(more * 16)
                await writer.drain()
                await play.pace()

    await play.repeat(attempt, 4)


@TABLE.entry(key=False)
async def settings_in_a_loop(play: Play) -> None:
    """SETTINGS frames, each of which the server must acknowledge."""
    await _flood(play, lambda n: frame(SETTINGS, payload=struct.pack(">HI", 4, 65535 + n % 2)) * 16)


@TABLE.entry(key=False)
async def pings_in_a_loop(play: Play) -> None:
    """PING frames, each of which the server must answer."""
    await _flood(play, lambda n: frame(PING, payload=struct.pack(">Q", n)) * 16)


@TABLE.entry(key=False)
async def window_updates_in_a_loop(play: Play) -> None:
    """WINDOW_UPDATE frames of one byte."""
    await _flood(play, lambda n: frame(WINDOW, payload=struct.pack(">I", 1)) * 16)


@TABLE.entry(key=False)
async def priorities_in_a_loop(play: Play) -> None:
    """PRIORITY frames for streams that do not exist."""
    await _flood(play, lambda n: frame(PRIORITY, 0, n + 2, struct.pack(">IB", n, 7)) * 4)


@TABLE.entry(key=False)
async def unknown_frames(play: Play) -> None:
    """Frames of kinds that nobody has defined."""
    await _flood(play, lambda n: frame(0xAA, 0xFF, n, b"z" * 100))


@TABLE.entry(key=False)
async def empty_data_frames(play: Play) -> None:
    """DATA frames without data, on a call that has begun."""
    begin, nothing = frame(HEADERS, END_HEADERS, 1, call_headers(play, GENERATE)), frame(DATA, 0, 1)

    async def attempt() -> None:
        async with http2(play) as (_, writer):
            writer.write(begin)
            while play.left_s:
                writer.write(nothing * 256)
                await writer.drain()
                await play.pace()

    await play.repeat(attempt, 4)


@TABLE.entry(key=True)
async def calls_that_may_not_be_answered(play: Play) -> None:
    """Calls with a window of zero bytes: what the server answers has nowhere to go."""
    body = message(b"\x1a\x05hello" + b"\x3a\x03\x08\xf4\x03")
    call = call_headers(play, GENERATE)

    async def attempt() -> None:
        async with http2(play, NO_WINDOW) as (_, writer):
            for number in range(16):
                stream = 2 * number + 1
                writer.write(frame(HEADERS, END_HEADERS, stream, call) + frame(DATA, END_STREAM, stream, body))
            await writer.drain()
            await play.hold()

    await play.repeat(attempt, 2)


@TABLE.entry(key=False)
async def health_checks_nobody_reads(play: Play) -> None:
    """Health checks over connections whose answers are not read."""
    fields = call_headers(play, CHECK)

    async def attempt() -> None:
        async with http2(play, receive_bytes=4096) as (_, writer):
            for stream in STREAMS:
                call = frame(HEADERS, END_HEADERS, stream, fields) + frame(DATA, END_STREAM, stream, message(b""))
                writer.write(call)
                if stream % 64 == 1:
                    await writer.drain()
                    await play.pace()

    await play.repeat(attempt, 4)


@TABLE.entry(key=False)
async def slow_messages(play: Play) -> None:
    """A message of 8 MB that is announced, and comes a byte at a time, on as many connections as are allowed."""
    begin = frame(HEADERS, END_HEADERS, 1, call_headers(play, GENERATE)) + frame(DATA, 0, 1, b"\0\x00\x7a\x00\x00")

    async def attempt() -> None:
        async with http2(play) as (_, writer):
            writer.write(begin)
            while play.left_s:
                writer.write(frame(DATA, 0, 1, b"x"))
                await writer.drain()
                await asyncio.sleep(0.5)

    await play.repeat(attempt, play.target.most_connections + 5)


@TABLE.entry(key=False)
async def huge_metadata(play: Play) -> None:
    """Calls with 200 KB of metadata."""
    fields = call_headers(play, CHECK, [(f"x-{number}", "v" * 1000) for number in range(200)])

    async def attempt() -> None:
        async with http2(play) as (_, writer):
            writer.write(frame(HEADERS, 0, 1, fields[:16_000]))
            for begin in range(16_000, len(fields), 16_000):
                flags = END_HEADERS if begin + 16_000 >= len(fields) else 0
                writer.write(frame(CONTINUATION, flags, 1, fields[begin : begin + 16_000]))
            await writer.drain()
            await asyncio.sleep(0.05)

    await play.repeat(attempt, 8)


@TABLE.entry(key=False)
async def broken_frames(play: Play) -> None:
    """Random bytes after the preface."""

    async def attempt() -> None:
        async with http2(play) as (_, writer):
            writer.write(play.draw.randbytes(4096))
            await writer.drain()
            await asyncio.sleep(0.02)

    await play.repeat(attempt, 8)


@TABLE.entry(key=False)
async def prefaces_and_no_more(play: Play) -> None:
    """Connections that stop after the preface, twice as many as are allowed."""

    async def attempt() -> None:
        async with dialled(play.target.grpc, tls(play.target, "h2")) as (reader, writer):
            writer.write(PREFACE)
            while await reader.read(1 << 16):
                pass
            await asyncio.sleep(0.05)

    await play.repeat(attempt, 2 * play.target.most_connections)


@TABLE.entry(key=False)
async def slow_grpc_handshakes(play: Play) -> None:
    """Connections that never finish their handshake."""

    async def attempt() -> None:
        async with dialled(play.target.grpc) as (reader, writer):
            writer.write(b"\x16\x03\x01\x02\x00\x01\x00" if play.target.ca else PREFACE[:5])
            await reader.read(1)
            await asyncio.sleep(0.05)

    await play.repeat(attempt, play.target.most_connections + 5)


@TABLE.entry(key=False)
async def http1_at_the_grpc_port(play: Play) -> None:
    """Requests of HTTP/1.1 where HTTP/2 is spoken."""

    async def attempt() -> None:
        async with dialled(play.target.grpc, tls(play.target)) as (reader, writer):
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
            await writer.drain()
            await reader.read(4096)

    await play.repeat(attempt, 8)
