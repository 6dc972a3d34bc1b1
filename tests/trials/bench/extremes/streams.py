"""Gaps between tokens of streams on a decode worker, beside answers that follow a hostile grammar or none."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc.aio

from tests.cluster.processes import Client
from tests.trials.bench.extremes.outputs import HOSTILE
from twostroke.rpc.v1.inference_pb2 import StructuredOutput

PROMPT = [504, 3575, 282, 4649, 314, 260, 2240, 282, 1005, 29, 1398, 253, 1343, 327, 354, 28, 284, 1449, 30]
LONGEST_TOKENS = 1500
"""Tokens of a stream that is measured: more than fit into a round, and less than the model takes."""
BEGIN_S = 1.0
"""Time in which streams begin, before the first gap counts."""


async def gaps_s(client: Client, seconds: float, *, streams: int, beside: int, is_hostile: bool) -> list[float]:
    """Returns all gaps of the streams within so many seconds."""
    gaps = list[float]()
    counted_from_s = time.perf_counter() + BEGIN_S
    tasks = [asyncio.create_task(_read(client, seed, counted_from_s, gaps)) for seed in range(streams)]
    tasks += [asyncio.create_task(_beside(client, seed, is_hostile=is_hostile)) for seed in range(beside)]
    try:
        await asyncio.sleep(BEGIN_S + seconds)
    finally:
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return gaps


async def _read(client: Client, seed: int, counted_from_s: float, gaps: list[float]) -> None:
    while True:
        before_s: float | None = None
        async for response in client.stream(
            [*PROMPT, seed], max_tokens=LONGEST_TOKENS, ignore_eos=True, temperature=1.0, seed=seed
        ):
            now_s = time.perf_counter()
            if response.token_ids:
                if before_s is not None and before_s >= counted_from_s:
                    gaps.append(now_s - before_s)
                before_s = now_s


async def _beside(client: Client, seed: int, *, is_hostile: bool) -> None:
    """Has one answer after another; a hostile one ends where its grammar takes more than it may."""
    output = {"structured_output": StructuredOutput(grammar=HOSTILE)} if is_hostile else {}
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await client.tokens([*PROMPT, 1000 + seed], max_tokens=LONGEST_TOKENS, ignore_eos=True, seed=seed, **output)
