"""A client of the dispatcher, and what it may expect of any worker."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from array import array
from collections.abc import Callable

from router.fleet.worker_link import TokenDelta
from router.serving.dispatcher import RouterCore
from router.serving.generate_request import GenerateRequest
from twostroke.request import Request
from twostroke.rpc.convert import sampling_to_message, tokens_to_messages
from twostroke.rpc.v1 import worker_pb2


def next_token(known: list[int]) -> int:
    return zlib.crc32(array("I", known).tobytes()) % 5000


def expected_tokens(prompt: tuple[int, ...], count: int, choice: int = 0) -> list[int]:
    """What any worker answers; another choice begins with another token."""
    known = [*prompt, choice]
    for _ in range(count):
        known.append(next_token(known))
    return known[len(prompt) + 1 :]


def request_snapshot(request: Request, tokens: list[int], *, is_finished: bool) -> worker_pb2.RequestSnapshot:
    """Return what a worker tells of a request that it has."""
    return worker_pb2.RequestSnapshot(
        request_id=request.request_id,
        attempt=request.attempt,
        prompt=request.prompt,
        sampling=sampling_to_message(request.sampling),
        tokens=[*tokens_to_messages(request.emitted), *(worker_pb2.Token(id=token) for token in tokens)],
        finish_reason="length" if is_finished else "",
    )


class Ask:
    """A client: runs `generate` in a task and keeps what came."""

    def __init__(self, core: RouterCore, request: GenerateRequest) -> None:
        self.core, self.request = core, request
        self.tokens: dict[int, list[int]] = {i: [] for i in range(len(request.sampling))}
        self.positions: dict[int, list[int]] = {i: [] for i in range(len(request.sampling))}
        self.finishes: dict[int, TokenDelta] = {}
        self._deltas = 0
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> Ask:
        async with contextlib.aclosing(self.core.generate(self.request, self._take)) as events:
            async for index, delta in events:
                self._keep(index, delta)
                if delta.finish is not None:
                    self.finishes[index] = delta
        return self

    def _take(self, index: int, delta: TokenDelta) -> bool:
        """Take every third delta at once; the others wait."""
        self._deltas += 1
        if self._deltas % 3:
            return False
        self._keep(index, delta)
        return True

    def _keep(self, index: int, delta: TokenDelta) -> None:
        self.tokens[index] += [sampled.token for sampled in delta.tokens]
        self.positions[index] += range(delta.position, delta.position + len(delta.tokens))

    async def has(self, count: int, index: int = 0) -> None:
        await eventually(lambda: len(self.tokens[index]) >= count or self.task.done())
        assert len(self.tokens[index]) >= count, self.task

    @property
    def is_right(self) -> bool:
        return all(
            self.tokens[i] == expected_tokens(self.request.prompt, self.request.sampling[i].max_tokens, i)
            and self.positions[i] == list(range(self.request.sampling[i].max_tokens))
            for i in self.tokens
        )


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # any state of any fake may be what is waited for
            await asyncio.sleep(0.005)
