"""A prompt of which a peer holds the beginning, and what workers did about it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tests.unit.worker.callers import Puller, Received, Router
from tests.unit.worker.rig import BLOCK, Running, expected_tokens, paced, prompt_of
from twostroke.config import ScheduleConfig
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2

HELD, BLOCKS = 9, 12
"""Blocks of the prompt that the peer holds, and all of them."""
PROMPT = prompt_of(BLOCKS * BLOCK + 8)
SLOW = paced(prefill_tokens_per_s=400)
"""Prefill at 40 ms per block: long enough to do something meanwhile."""
BY_BLOCK = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=BLOCK)


async def warm(worker: Running, tokens: Sequence[int]) -> None:
    """Lets a prefill worker build the full blocks of a prompt."""
    async with contextlib.aclosing(Puller(worker.info)) as puller:
        blocks = len(tokens) // BLOCK
        call = puller.pull(tokens[: blocks * BLOCK])
        await puller.pages(call, blocks)
        call.cancel()
    await worker.idle()


async def right_answer(router: Router, **options) -> Received:
    """Whatever happened on the way: no error, and the tokens that the right pages lead to."""
    got = await router.answer(PROMPT, 6, **options)
    assert not got.last.error.kind, got.last
    assert got.tokens == expected_tokens(PROMPT, 6)
    return got


def held_by(worker: Running | worker_pb2.PageSource, blocks: int = HELD) -> PeerPrefix:
    return PeerPrefix(worker.source if isinstance(worker, Running) else worker, blocks)


def computed(worker: Running) -> float:
    return worker.metric("computed_tokens_total")


def fetched(worker: Running) -> float:
    return worker.metric("peer_pulled_blocks_total")


def failures(worker: Running, reason: str) -> float:
    return worker.metric("peer_pull_failures_total", reason=reason)
