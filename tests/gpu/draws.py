"""Draws from logits on the device: token for token the host sampler's, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from tests.gpu.measure import DEVICE, ON_GPU
from tests.gpu.report import Report, Row
from twostroke.engine.device_sampler import draw_rows
from twostroke.engine.sampler import sample
from twostroke.request import SamplingParams
from twostroke.scheduler.batch import SampleRow

KINDS: tuple[dict[str, float], ...] = ({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8})
LEAST_DECIDED = 0.75
"""The least share of rows decided on the device; the others take the long way over the host."""


def check_draws(_report: Report) -> Iterator[Row]:
    rows, vocab = (64, 128256) if ON_GPU else (20, 4000)
    random = torch.Generator().manual_seed(7)
    logits = (torch.randn(rows, vocab, generator=random) * 3).bfloat16()
    asked = [_row(seed, KINDS[seed % len(KINDS)]) for seed in range(rows)]
    expected = sample(logits, asked)
    there = logits.to(DEVICE)
    draw_rows(there, asked)
    began_s = time.perf_counter()
    drawn = draw_rows(there, asked)
    ms = (time.perf_counter() - began_s) * 1e3
    decided = [(mine, right) for mine, right in zip(drawn, expected, strict=True) if mine is not None]
    wrong = sum(mine != right for mine, right in decided)
    passed = not wrong and len(decided) >= LEAST_DECIDED * rows
    yield Row(f"{rows} draws of {vocab}, as on the host", f"{len(decided) - wrong} ({ms:.1f} ms)", passed=passed)


def _row(seed: int, kind: dict[str, float]) -> SampleRow:
    settings = {"seed": seed, "max_tokens": 1000, "temperature": 0.8, **kind}
    return SampleRow(0, SamplingParams(**settings), position=seed)  # type: ignore[arg-type]  # of the keys above
