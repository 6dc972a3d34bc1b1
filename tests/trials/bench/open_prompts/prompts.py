"""A client of one decode worker that keeps so many long prompts open, as a router would."""

from __future__ import annotations

import asyncio
import random
import time

import grpc.aio

from twostroke.base.errors import PeerLost
from twostroke.base.ids import RequestId
from twostroke.kv_cache.block import block_hashes_of
from twostroke.request import Attempt, GenerateRequest, SamplingParams
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.convert import attempt_to_message
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc

TokensCall = grpc.aio.UnaryStreamCall[worker_pb2.TokensRequest, worker_pb2.TokenBatch]

ROUTER_ID = "bench"
VOCABULARY = 32_000
ANSWER_TOKENS = 4


class OpenPrompts:
    """Opens prompts at a decode worker; their pages come from one prefill worker."""

    def __init__(
        self, us: Membership, decode: worker_pb2.PageSource, prefill: worker_pb2.PageSource, fingerprint: str
    ) -> None:
        self._decode = decode
        self._prefill = prefill
        self._fingerprint = fingerprint
        self._channel = PeerChannel(decode.address, us)
        self._stub = worker_pb2_grpc.DecodeStub(self._channel.channel)
        self._ended: dict[str, asyncio.Future[None]] = {}
        self.first_token_s: list[float] = []
        """Seconds from the opening of each prompt to its first token."""
        self._opened_s: dict[str, float] = {}
        self._reader: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        call = self._stub.Tokens(worker_pb2.TokensRequest(router_id=ROUTER_ID), metadata=self._channel.metadata)
        await call.read()
        self._reader = asyncio.create_task(self._read(call))

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def answer_all(self, number: int, most_open: int, tokens: int) -> None:
        """Lets so many new prompts be answered, `most_open` of them at a time. Raises PeerLost where one fails."""
        names = iter([f"{len(self._ended)}-{each}" for each in range(number)])

        async def one_after_the_other() -> None:
            for name in names:
                await self._answer(name, tokens)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(most_open):
                tasks.create_task(one_after_the_other())

    async def _answer(self, name: str, tokens: int) -> None:
        ended = self._ended[name] = asyncio.get_running_loop().create_future()
        prompt = tuple(random.Random(name).choices(range(VOCABULARY), k=tokens))
        sampling = SamplingParams(seed=1, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        attempt = Attempt(
            request=GenerateRequest(prompt=prompt, sampling=sampling),
            request_id=RequestId(name),
            number=0,
            emitted=(),
            block_hashes=tuple(block_hashes_of(prompt, 16)),
            router_id=ROUTER_ID,
        )
        message = attempt_to_message(
            attempt, fingerprint=self._fingerprint, worker_epoch=self._decode.epoch, source=self._prefill
        )
        self._opened_s[name] = time.perf_counter()
        await self._stub.Open(message, metadata=self._channel.metadata)
        await ended
        closing = worker_pb2.CloseRequest(request_id=name, attempt=0)
        await self._stub.Close(closing, metadata=self._channel.metadata)

    async def _read(self, call: TokensCall) -> None:
        async for batch in call:
            for entry in batch.entries:
                opened_s = self._opened_s.pop(entry.request_id, None)
                if opened_s is not None:
                    self.first_token_s.append(time.perf_counter() - opened_s)
                if entry.finish_reason == "error":
                    self._ended[entry.request_id].set_exception(PeerLost(str(entry.error)))
                elif entry.finish_reason:
                    self._ended[entry.request_id].set_result(None)
