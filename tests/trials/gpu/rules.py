"""Layers with windows, soft caps and sinks: Triton's kernels against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tests.trials.gpu.kernels import (
    GPU_SPANS,
    INTERPRETED_SPANS,
    WORST,
    Case,
    Shape,
    recorded_errors,
    step_errors,
)
from tests.trials.gpu.measure import DEVICE, ON_GPU
from tests.trials.gpu.report import Report, Row
from twostroke.kernels.attention.rules import AttentionRule

SHAPES = (
    (
        Shape(torch.bfloat16, 64, 8, 64),  # gpt-oss
        Shape(torch.bfloat16, 4, 1, 256),  # Gemma 3
        Shape(torch.bfloat16, 16, 8, 128),
        Shape(torch.float32, 8, 2, 64),
    )
    if ON_GPU
    else (Shape(torch.float32, 4, 2, 64),)
)
WINDOW = 128 if ON_GPU else 16
PLAIN = AttentionRule(scale=0.1)
RULES = {
    "window": AttentionRule(scale=0.1, window=WINDOW),
    "cap": AttentionRule(scale=0.2, softcap=5.0),
    "window, cap": AttentionRule(scale=0.2, window=3 * WINDOW + 5, softcap=5.0),
}


def check_rules(_report: Report) -> Iterator[Row]:
    for index, shape in enumerate(SHAPES):
        case = Case(shape, GPU_SPANS if ON_GPU else INTERPRETED_SPANS, seed=index)
        for name, rule in RULES.items():
            for sinks in (None, torch.linspace(-4, 4, shape.heads)):
                errors = step_errors(case, DEVICE, (PLAIN, rule), sinks)
                errors |= recorded_errors(case, DEVICE, (PLAIN, rule), sinks)
                worst = max(errors.values(), key=lambda error: float("inf") if math.isnan(error) else error)
                passed = all(error <= WORST[shape.dtype] for error in errors.values())
                what = f"{shape}, {name}{'' if sinks is None else ', sinks'}"
                yield Row(what, f"{worst:.1e}", None, f"<= {WORST[shape.dtype]:.0e}", passed)
