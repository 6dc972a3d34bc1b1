"""Hostile clients that make calls: at the clients' gRPC port, and at the ports of operators, workers and pages."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Sequence

import grpc
import grpc.aio

from tests.trials.chaos.neighbours.target import Play, Table
from tests.trials.chaos.neighbours.wire import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    UNLIMITED,
    call_headers,
    channel,
    dialled,
    frame,
    http2,
    message,
    shown,
)
from twostroke.rpc.proof import TOKEN_KEY
from twostroke.rpc.v1 import inference_pb2

TABLE = Table("gRPC")
INFERENCE = "/twostroke.v1.Inference"
GENERATE = f"{INFERENCE}/Generate"
WATCH, CHECK, LIST = (f"/grpc.health.v1.Health/{name}" for name in ("Watch", "Check", "List"))
REFLECTION = [f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1alpha", "v1")]
OPERATORS = [
    "/twostroke.v1.Control/GetLoad",
    "/twostroke.v1.Control/Drain",
    "/twostroke.v1.Control/SubscribeKvEvents",
    "/twostroke.v1.Routing/WatchReservations",
    "/twostroke.v1.Faults/Arm",
]
WORKERS = [
    "/twostroke.v1.Decode/Open",
    "/twostroke.v1.Decode/Tokens",
    "/twostroke.v1.Pages/Pull",
    "/twostroke.v1.Pages/Fetch",
]
LARGE = bytes(30 << 20)


def request(play: Play, **fields: object) -> bytes:
    asked = inference_pb2.GenerateRequest(model=play.target.model, **fields)  # type: ignore[arg-type]
    asked.stop.max_tokens = asked.stop.max_tokens or 8
    return asked.SerializeToString()


async def _calls(play: Play, messages: Sequence[bytes], at_once: int = 8, most: int = 1 << 30) -> None:
    """Generate, again and again; of each answer `most` messages are read, and the call is cancelled."""
    async with channel(play) as open_channel:

        async def attempt() -> None:
            call = open_channel.unary_stream(GENERATE)(play.draw.choice(messages), metadata=shown(play), timeout=30)
            try:
                for _ in range(most):
                    if await call.read() is grpc.aio.EOF:
                        break
            finally:
                call.cancel()

        await play.repeat(attempt, at_once)


@TABLE.entry(key=False)
async def a_hundred_watches(play: Play) -> None:
    """Idle watches of health, as many as there may be connections, each on its own (23)."""

    async def attempt() -> None:
        async with channel(play) as own:
            call = own.unary_stream(WATCH)(b"", timeout=play.left_s + 1)
            while await call.read() is not grpc.aio.EOF:
                pass

    await play.repeat(attempt, min(120, play.target.most_connections + 5))


@TABLE.entry(key=False)
async def watches_on_one_connection(play: Play) -> None:
    """A thousand watches of health over one connection (18)."""
    async with channel(play) as own:

        async def attempt() -> None:
            call = own.unary_stream(WATCH)(b"", timeout=play.left_s + 1)
            while await call.read() is not grpc.aio.EOF:
                pass

        await play.repeat(attempt, 1000)


@TABLE.entry(key=False)
async def health_checks_in_a_loop(play: Play) -> None:
    """Checks and List of health, for services that exist and others (18)."""
    async with channel(play) as own:

        async def attempt() -> None:
            name = play.draw.choice((b"", b"\n\x05ready", b"\n\x04live", b"\n\x7f" + b"x" * 127))
            await own.unary_unary(play.draw.choice((CHECK, LIST)))(name, timeout=5)

        await play.repeat(attempt, 16)


@TABLE.entry(key=False)
async def reflection_in_a_loop(play: Play) -> None:
    """Questions after every file that the server knows (18)."""
    async with channel(play) as own:

        async def attempt() -> None:
            call = own.stream_stream(play.draw.choice(REFLECTION))(timeout=5)
            for _ in range(50):
                await call.write(b"\x3a\x00")
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass

        await play.repeat(attempt, 8)


@TABLE.entry(key=True)
async def calls_cancelled_in_a_loop(play: Play) -> None:
    """Long answers that are cancelled after their first message."""
    await _calls(play, [request(play, text="go", stop=inference_pb2.StopOptions(max_tokens=500))], 16, most=1)


@TABLE.entry(key=True)
async def prompts_of_2_megabytes_over_grpc(play: Play) -> None:
    """Prompts of words, far too long (1)."""
    await _calls(play, [request(play, text="the quick brown fox " * 100_000)], 2)


@TABLE.entry(key=True)
async def two_million_token_ids(play: Play) -> None:
    """Prompts of token ids, far too long."""
    await _calls(play, [request(play, token_ids=inference_pb2.TokenIds(ids=[7] * 2_000_000))], 2)


@TABLE.entry(key=True)
async def many_choices_over_grpc(play: Play) -> None:
    """128 choices with 20 log probabilities (4, 25)."""
    sampling = inference_pb2.SamplingOptions(logprobs=20)
    await _calls(play, [request(play, text="go", n=128, sampling=sampling, stop={"max_tokens": 100})], 2)


@TABLE.entry(key=True)
async def chats_of_4_096_messages_over_grpc(play: Play) -> None:
    """Sends as many messages as a chat may have."""
    said = [inference_pb2.ChatMessage(role="user", content="hello")] * 4096
    await _calls(play, [request(play, chat=inference_pb2.Chat(messages=said))], 4)


@TABLE.entry(key=True)
async def extreme_values_over_grpc(play: Play) -> None:
    """Numbers at and beyond their bounds, in every field of sampling (2)."""
    extremes = (float("nan"), float("inf"), -float("inf"), 1e308, 1e39, 5e-324, -1.0)
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    messages = [request(play, text="go", sampling={name: value}) for name in names for value in extremes]
    messages += [request(play, text="go", priority=2**31 - 1), request(play, text="go", n=2**32 - 1)]
    await _calls(play, messages)


@TABLE.entry(key=True)
async def stop_strings_over_grpc(play: Play) -> None:
    """16 stop strings of 1,024 characters that nearly come (5)."""
    stops = ["".join(play.draw.choices("ab ", k=1023)) + str(number) for number in range(16)]
    stop = inference_pb2.StopOptions(stop=stops, max_tokens=400)
    await _calls(play, [request(play, text="go", n=4, stop=stop)], 4)


@TABLE.entry(key=True)
async def resume_tokens_over_grpc(play: Play) -> None:
    """Resumes tokens of streams that there are not."""
    messages = [request(play, text="go", resume_from=f"{play.draw.randbytes(8).hex()}~{n:016x}:0:3") for n in range(99)]
    await _calls(play, messages)


@TABLE.entry(key=True)
async def endless_deadlines(play: Play) -> None:
    """Calls whose deadline lies centuries ahead (8)."""
    async with channel(play) as own:

        async def attempt() -> None:
            call = own.unary_stream(GENERATE)(request(play, text="go"), metadata=shown(play), timeout=1e10)
            while await call.read() is not grpc.aio.EOF:
                pass

        await play.repeat(attempt, 8)


@TABLE.entry(key=True)
async def deadlines_of_microseconds(play: Play) -> None:
    """Calls whose deadline is over before they arrive."""
    async with channel(play) as own:

        async def attempt() -> None:
            await own.unary_stream(GENERATE)(request(play, text="go"), metadata=shown(play), timeout=1e-5).read()

        await play.repeat(attempt, 8)


@TABLE.entry(key=True)
async def aborts_of_foreign_ids(play: Play) -> None:
    """Aborts of ids that are not this client's, of the honest one's among them (32)."""
    async with channel(play) as own:

        async def attempt() -> None:
            name = f"honest-{play.draw.randrange(1000)}" if play.draw.random() < 0.5 else play.draw.randbytes(9).hex()
            body = inference_pb2.AbortRequest(request_id=name).SerializeToString()
            await own.unary_unary(f"{INFERENCE}/Abort")(body, metadata=shown(play), timeout=5)

        await play.repeat(attempt, 16)


@TABLE.entry(key=True)
async def tokenize_megabytes_over_grpc(play: Play) -> None:
    """Tokenize with 7.9 MB (24)."""
    body = inference_pb2.TokenizeRequest(text="ab " * 2_630_000).SerializeToString()
    async with channel(play) as own:

        async def attempt() -> None:
            await own.unary_unary(f"{INFERENCE}/Tokenize")(body, metadata=shown(play), timeout=30)

        await play.repeat(attempt, 2)


@TABLE.entry(key=False)
async def compressed_bombs(play: Play) -> None:
    """Messages of some kilobytes that are a gigabyte when they are unpacked, without a key."""
    async with channel(play) as own:

        async def attempt() -> None:
            zeros = bytes(8_000_000)
            await own.unary_stream(GENERATE)(zeros, timeout=10, compression=grpc.Compression.Gzip).read()

        await play.repeat(attempt, 4)


@TABLE.entry(key=False)
async def messages_without_a_key(play: Play) -> None:
    """Messages of 7 MB from who has no key."""
    body = bytes(7_000_000)
    async with channel(play) as own:

        async def attempt() -> None:
            await own.unary_stream(GENERATE)(body, timeout=10).read()

        await play.repeat(attempt, 8)


@TABLE.entry(key=False)
async def methods_that_are_not_there(play: Play) -> None:
    """Calls of random methods."""
    async with channel(play) as own:

        async def attempt() -> None:
            await own.unary_unary(f"/a.Service/{play.draw.randbytes(8).hex()}")(b"x" * 1000, timeout=5)

        await play.repeat(attempt, 16)


@TABLE.entry(key=False)
async def fresh_channels_in_a_loop(play: Play) -> None:
    """A connection for each call, closed after it."""

    async def attempt() -> None:
        async with channel(play) as own:
            await own.unary_unary(CHECK)(b"", timeout=5)

    await play.repeat(attempt, 8)


# The ports of operators, workers and pages


async def _strangers(play: Play, addresses: Sequence[str], paths: Sequence[str], body: bytes, at_once: int) -> None:
    """Calls without the cluster's token, or with a wrong one."""
    options = (("grpc.use_local_subchannel_pool", 1), *UNLIMITED)
    channels = [grpc.aio.insecure_channel(address, options=options) for address in addresses]

    async def attempt() -> None:
        metadata = play.draw.choice(((), ((TOKEN_KEY, play.draw.randbytes(32).hex()),)))
        method = play.draw.choice(channels).unary_stream(play.draw.choice(list(paths)))
        await method(body, metadata=metadata, timeout=10).read()

    try:
        await play.repeat(attempt, at_once)
    finally:
        for each in channels:
            await each.close()


@TABLE.entry(key=False, port="admin")
async def wrong_tokens_at_the_admin_port(play: Play) -> None:
    """Calls of operators with a wrong token."""
    await _strangers(play, [play.target.admin], OPERATORS, b"", 16)


@TABLE.entry(key=False, port="admin")
async def large_messages_at_the_admin_port(play: Play) -> None:
    """20 messages of 30 MiB at once, without a token (27)."""
    await _strangers(play, [play.target.admin], OPERATORS, LARGE, 20)


@TABLE.entry(key=False, port="worker rpc")
async def large_messages_at_workers(play: Play) -> None:
    """The same at the workers' rpc ports (27)."""
    await _strangers(play, play.target.workers, WORKERS, LARGE, 20)


@TABLE.entry(key=False, port="worker rpc")
async def wrong_tokens_at_workers(play: Play) -> None:
    """Calls of routers with a wrong token."""
    await _strangers(play, play.target.workers, WORKERS, b"", 16)


@TABLE.entry(key=False, port="fleet")
async def strangers_at_the_fleet_service(play: Play) -> None:
    """Watches and reports from who is not a router, and large ones."""
    paths = [f"/twostroke.v1.Fleet/{name}" for name in ("Watch", "Report", "DrainWorker", "AssignRole")]
    await _strangers(play, [play.target.fleet], paths, bytes(1 << 20), 8)


@TABLE.entry(key=False, port="admin")
async def silent_connections_at_the_admin_port(play: Play) -> None:
    """Hundreds of connections that say nothing."""
    await _silent(play, [play.target.admin], 300)


@TABLE.entry(key=False, port="pages")
async def silent_connections_at_page_ports(play: Play) -> None:
    """Hundreds of connections to the page ports that say nothing."""
    await _silent(play, play.target.pages, 300)


async def _silent(play: Play, addresses: Sequence[str], connections: int) -> None:
    async def attempt() -> None:
        async with dialled(play.draw.choice(list(addresses))) as (reader, _):
            while await reader.read(1 << 16):
                pass
            await asyncio.sleep(0.05)

    await play.repeat(attempt, connections)


@TABLE.entry(key=False, port="pages")
async def garbage_at_page_ports(play: Play) -> None:
    """Frames of random bytes, and lengths of gigabytes, at the page ports."""

    async def attempt() -> None:
        async with dialled(play.draw.choice(list(play.target.pages))) as (reader, writer):
            length = play.draw.choice((0, 10, 4096, 1 << 31, (1 << 32) - 1))
            writer.write(struct.pack(play.draw.choice((">I", "<I")), length) + play.draw.randbytes(4096))
            await writer.drain()
            async with asyncio.timeout(0.2):
                await reader.read(4096)

    await play.repeat(attempt, 8)


@TABLE.entry(key=False, port="worker rpc")
async def garbage_at_worker_ports(play: Play) -> None:
    """Random bytes, plain or as a handshake, at workers' rpc ports."""

    async def attempt() -> None:
        async with dialled(play.draw.choice(list(play.target.workers))) as (reader, writer):
            writer.write(play.draw.choice((b"\x16\x03\x01\x02\x00", b"")) + play.draw.randbytes(2048))
            await writer.drain()
            async with asyncio.timeout(0.2):
                await reader.read(4096)

    await play.repeat(attempt, 8)


@TABLE.entry(key=False)
async def packed_bombs_by_hand(play: Play) -> None:
    """Sends the bombs above, packed beforehand: 64 MB of zeros in 64 KB, flagged as compressed."""
    bomb = message(gzip.compress(bytes(64_000_000), 9), compressed=1)
    fields = call_headers(play, GENERATE, [("grpc-encoding", "gzip")])
    pieces = [bomb[begin : begin + 16_000] for begin in range(0, len(bomb), 16_000)]

    async def attempt() -> None:
        async with http2(play) as (_, writer):
            writer.write(frame(HEADERS, END_HEADERS, 1, fields))
            for piece in pieces:
                writer.write(frame(DATA, END_STREAM if piece is pieces[-1] else 0, 1, piece))
            await writer.drain()
            await asyncio.sleep(0.3)

    await play.repeat(attempt, 4)
