"""The parts of a layer's attention rule in kernels: windows, soft caps and sinks, besides the scale.

Scores are in base 2. For a rule without a window or a cap, kernels are compiled without the code for them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from twostroke.kernels.attention.rules import AttentionRule

LOG2_E: Final = 1.4426950408889634


def rule_arguments(rule: AttentionRule, sinks: torch.Tensor | None) -> dict[str, Any]:
    """Returns the compile-time arguments of kernels. A model has few windows, and so few kernels."""
    return {"WINDOW": rule.window or 0, "CAPPED": rule.softcap is not None, "HAS_SINKS": sinks is not None}


def score_factors(rule: AttentionRule) -> tuple[float, float]:
    """Returns the factor of products of queries and keys, and the factor of the results of `capped`.

    Without a cap, the products are then scores in base 2. With one, they are the arguments of its tanh, times 2
    log2(e).
    """
    if rule.softcap is None:
        return rule.scale * LOG2_E, 1.0
    return rule.scale * 2 * LOG2_E / rule.softcap, rule.softcap * LOG2_E


@triton.jit
def capped(scores, cap_log2, CAPPED: tl.constexpr):
    """Returns scores in base 2, from products that were multiplied by the first of `score_factors`."""
    if CAPPED:
        scores = cap_log2 * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    return scores


@triton.jit
def first_seen(context, rows, WINDOW: tl.constexpr):
    """Returns the first position that any row of a span attends to."""
    first = 0
    if WINDOW != 0:
        first = tl.maximum(context - rows - WINDOW + 1, 0)
    return first


@triton.jit
def is_seen(at, last, WINDOW: tl.constexpr):
    """Returns [rows, keys]: whether each row attends to each position. `last` is the last position of each row."""
    seen = at[None, :] <= last[:, None]
    if WINDOW != 0:
        seen &= at[None, :] > last[:, None] - WINDOW
    return seen


@triton.jit
def with_sink(acc, best, total, sink):
    """Returns the sums of weighted values and of weights, with each row's sink added. The value of a sink is zero."""
    score = sink * 1.4426950408889634
    pivot = tl.maximum(best, score)
    decay = tl.exp2(best - pivot)
    return acc * decay[:, None], total * decay + tl.exp2(score - pivot)
