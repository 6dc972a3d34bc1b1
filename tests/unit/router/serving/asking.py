"""A client of the dispatcher, and what it may expect of any worker."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from array import array
from collections.abc import Callable

from router.fleet.token_stream import TokenDelta
from router.serving.dispatcher import RouterCore
from router.serving.parent_request import ParentRequest
from twostroke.request import Attempt
from twostroke.rpc.convert import request_to_message, tokens_to_messages
from twostroke.rpc.v1 import worker_pb2


def next_token(known: list[int]) -> int:
    return zlib.crc32(array("I", known).tobytes()) % 5000


def expected_tokens(prompt: tuple[int, ...], count: int, choice: int = 0) -> list[int]:
    """What any worker answers; another choice begins with another token."""
    known = [*prompt, choice]
    for _ in range(count):
        known.append(next_token(known))
    return known[len(prompt) + 1 :]


def request_snapshot(attempt: Attempt, tokens: list[int], *, is_finished: bool) -> worker_pb2.RequestSnapshot:
    """Returns what a worker tells of a request that it has."""
    return worker_pb2.RequestSnapshot(
        request_id=attempt.request_id,
        attempt=attempt.number,
        request=request_to_message(attempt.request),
        tokens=[*tokens_to_messages(attempt.emitted), *(worker_pb2.Token(id=token) for token in tokens)],
        finish_reason="length" if is_finished else "",
    )


class Ask:
    """A client: runs `generate` in a task and keeps what came."""

    def __init__(self, core: RouterCore, parent: ParentRequest) -> None:
        self.core, self.parent, self.request = core, parent, parent.request
        self.tokens: dict[int, list[int]] = {i: [] for i in range(parent.n)}
        self.positions: dict[int, list[int]] = {i: [] for i in range(parent.n)}
        self.finishes: dict[int, TokenDelta] = {}
        self._deltas = 0
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> Ask:
        async with contextlib.aclosing(self.core.generate(self.parent, self._take)) as events:
            async for index, delta in events:
                self._keep(index, delta)
                if delta.finish is not None:
                    self.finishes[index] = delta
        return self

    def _take(self, index: int, delta: TokenDelta) -> bool:
        """Takes every third delta at once; the others wait."""
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
            self.tokens[i] == expected_tokens(self.request.prompt, self.request.sampling.max_tokens, i)
            and self.positions[i] == list(range(self.request.sampling.max_tokens))
            for i in self.tokens
        )


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # any state of any fake may be what is waited for
            await asyncio.sleep(0.005)
