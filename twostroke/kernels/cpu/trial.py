"""A short trial of several builds of the native kernels: the same products and attention, by turns, in one thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.linear import SERVED, NativeLinears
from twostroke.kernels.pools.page_pool import PagePool

ROUNDS: Final = 6
"""How often each task runs. The first time does not count, and of the others the least does."""

OUTPUTS, INPUTS = 4096, 1024
"""Shape of the weight: 8 MiB, which one row of a decode step reads from beyond the nearer caches."""
ROWS: Final = (1, 16, 128)
"""Rows of a product: one stream, a batch of streams, and a prompt."""

SEQUENCES, CONTEXT, BLOCK, KV_HEADS, HEAD_DIM = 8, 512, 16, 3, 64
HEADS: Final = 9
"""Streams that attend to so many tokens each."""


def trial_seconds(loaded: Sequence[Kernels]) -> dict[str, tuple[float, ...]]:
    """Returns seconds of each task with each variant. They take turns, so that all meet the same disturbances."""
    with torch.inference_mode():
        tasks = [_tasks_of(kernels) for kernels in loaded]
        least_s = [[math.inf] * len(each) for each in tasks]
        for turn in range(ROUNDS):
            for each, least in zip(tasks, least_s, strict=True):
                for at, task in enumerate(each):
                    started_s = time.perf_counter()
                    task()
                    if turn:
                        least[at] = min(least[at], time.perf_counter() - started_s)
    return {kernels.variant: tuple(least) for kernels, least in zip(loaded, least_s, strict=True)}


def _tasks_of(kernels: Kernels) -> list[Callable[[], object]]:
    product = NativeLinears(kernels, None).linear(torch.ones(OUTPUTS, INPUTS, dtype=SERVED))
    inputs = [torch.ones(rows, INPUTS, dtype=SERVED) for rows in ROWS]
    pages = SEQUENCES * CONTEXT // BLOCK
    pool = PagePool.plain(torch.ones(pages, 1, 2, KV_HEADS, BLOCK, HEAD_DIM, dtype=SERVED))
    step = NativeAttention(pool, HEADS, HEAD_DIM**-0.5, kernels).begin(_batch(pages))
    queries = torch.ones(SEQUENCES, HEADS, HEAD_DIM, dtype=SERVED)
    return [*(lambda x=x: product(x) for x in inputs), lambda: step.attend(0, queries)]


def _batch(pages: int) -> RaggedBatch:
    """Returns the last token of every sequence."""
    tables = torch.arange(pages, dtype=torch.int32).view(SEQUENCES, -1)
    angles = torch.zeros(SEQUENCES, HEAD_DIM // 2)
    return RaggedBatch(
        positions=torch.full((SEQUENCES,), CONTEXT - 1, dtype=torch.int32),
        query_starts=tuple(range(SEQUENCES + 1)),
        context_lens=(CONTEXT,) * SEQUENCES,
        block_tables=tables,
        write_slots=tables[:, -1].long() * BLOCK + BLOCK - 1,
        cosines=angles.cos(),
        sines=angles.sin(),
    )
