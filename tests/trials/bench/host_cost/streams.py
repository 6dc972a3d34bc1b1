"""Clients that only count: tokens of one stream, as cheaply as Python can read them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from twostroke.base.errors import PeerLost
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

PROMPT_TOKENS = 8
EVENT = b"\ndata: "
"""The beginning of a server-sent event. Each carries one token."""


@dataclass(slots=True)
class Counted:
    """What all streams of one measurement have got."""

    tokens: int = 0
    begun: int = 0
    """Streams with a first token."""
    ended: str = ""
    """Why a stream has ended, which none should."""


class Streams(Protocol):
    counted: Counted

    async def open(self, number: int, most_tokens: int) -> None:
        """Begins one stream."""

    async def close(self) -> None: ...


class HttpStreams:
    def __init__(self, address: str) -> None:
        self.counted = Counted()
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._transports: list[asyncio.BaseTransport] = []

    async def open(self, number: int, most_tokens: int) -> None:
        body = json.dumps(
            {
                "prompt": prompt_of(number),
                "max_tokens": most_tokens,
                "stream": True,
                "ignore_eos": True,
                "seed": number,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: _EventCounter(self.counted), self._host, self._port)
        transport.write(request)
        self._transports.append(transport)

    async def close(self) -> None:
        self.counted = Counted()
        for transport in self._transports:
            transport.close()


class _EventCounter(asyncio.Protocol):
    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self._tail = b""
        """The last bytes, in which an event may have begun."""
        self._has_begun = False

    def data_received(self, data: bytes) -> None:
        events = (self._tail + data).count(EVENT)
        self._tail = data[1 - len(EVENT) :]
        self._counted.tokens += events
        if events and not self._has_begun:
            self._has_begun = True
            self._counted.begun += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._counted.ended = f"a connection ended: {exc or self._tail!r}"


class GrpcStreams:
    def __init__(self, address: str) -> None:
        self.counted = Counted()
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, number: int, most_tokens: int) -> None:
        self._tasks.append(asyncio.create_task(self._read(number, most_tokens)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _read(self, number: int, most_tokens: int) -> None:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt_of(number)),
            sampling=inference_pb2.SamplingOptions(seed=number),
            stop=inference_pb2.StopOptions(max_tokens=most_tokens, ignore_eos=True),
        )
        has_begun = False
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in self._stub.Generate(request):
                self.counted.tokens += len(response.token_ids)
                if response.token_ids and not has_begun:
                    has_begun = True
                    self.counted.begun += 1
        self.counted.ended = "a call ended"


async def until_all_run(streams: Streams, number: int, most_tokens: int, patience_s: float) -> None:
    """Opens so many streams and waits for a token of each. Raises PeerLost where they do not all run."""
    counted = streams.counted
    try:
        async with asyncio.timeout(patience_s):
            for each in range(number):
                await streams.open(each, most_tokens)
                if each % 16 == 0:
                    await asyncio.sleep(0.02)
            while counted.begun < number and not counted.ended:
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise PeerLost(f"{counted.begun} of {number} streams had begun after {patience_s:g} s") from None
    if counted.ended:
        raise PeerLost(counted.ended)


def prompt_of(number: int) -> list[int]:
    return [1 + (number * PROMPT_TOKENS + place) % 30_000 for place in range(PROMPT_TOKENS)]
