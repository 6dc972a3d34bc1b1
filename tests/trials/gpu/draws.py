"""Draws from logits on the device: token for token the host sampler's, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from tests.trials.gpu.measure import DEVICE, ON_GPU
from tests.trials.gpu.report import Report, Row
from twostroke.engine.sampling.device_sampler import draw_rows
from twostroke.engine.sampling.sampler import sample
from twostroke.request import SamplingParams
from twostroke.scheduler.batch import SampleRow

KINDS: tuple[dict[str, float], ...] = ({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8})
PERMITTED = (0.5, 0.9999, 0.001, 0.00005)
"""Shares of the vocabulary that grammars permit."""
LEAST_DECIDED = 0.75
"""The least share of rows decided on the device; the others take the long way over the host."""


def check_draws(_report: Report) -> Iterator[Row]:
    rows, vocab = (64, 128256) if ON_GPU else (20, 4000)
    random = torch.Generator().manual_seed(7)
    logits = (torch.randn(rows, vocab, generator=random) * 3).bfloat16()
    asked = [_row(seed, KINDS[seed % len(KINDS)]) for seed in range(rows)]
    bits = (
        torch.rand((rows, vocab), generator=random)
        < torch.tensor(PERMITTED)[torch.arange(rows) % len(PERMITTED)][:, None]
    )
    masks = np.packbits(np.pad(bits.numpy(), ((0, 0), (0, -vocab % 32))), axis=1, bitorder="little").view(np.uint32)
    masked = [row._replace(mask=mask) for row, mask in zip(asked, masks, strict=True)]
    greedy = [row._replace(params=replace(row.params, temperature=0)) for row in masked]
    for what, sampled in (("draws", asked), ("draws of grammars", masked), ("greedy tokens of grammars", greedy)):
        yield _drawn(f"{rows} {what} of {vocab}", logits, sampled)


def _drawn(what: str, logits: torch.Tensor, rows: list[SampleRow]) -> Row:
    began_s = time.perf_counter()
    expected = sample(logits, rows)
    host_ms = (time.perf_counter() - began_s) * 1e3
    there = logits.to(DEVICE)
    draw_rows(there, rows)
    began_s = time.perf_counter()
    drawn = draw_rows(there, rows)
    ms = (time.perf_counter() - began_s) * 1e3
    decided = [(mine, right) for mine, right in zip(drawn, expected, strict=True) if mine is not None]
    wrong = sum(mine != right for mine, right in decided)
    passed = not wrong and len(decided) >= LEAST_DECIDED * len(rows)
    return Row(what, f"{len(decided) - wrong} ({ms:.1f} ms)", ms / host_ms, "of the host", passed)


def _row(seed: int, kind: dict[str, float]) -> SampleRow:
    settings = {"seed": seed, "max_tokens": 1000, "temperature": 0.8, **kind}
    return SampleRow(0, SamplingParams(**settings), position=seed)  # type: ignore[arg-type]  # of the keys above
