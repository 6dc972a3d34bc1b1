"""Products with the model's weights, for as many rows as decode steps and prefill chunks have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tests.trials.bench.kernels.setting import Setting
from tests.trials.bench.kernels.timing import Result, Work, timed
from twostroke.kernels.products.linear import Linear
from twostroke.models.spec import ModelSpec

ROWS = (1, 4, 16, 32, 512)
UNCACHED_BYTES = 256 << 20
"""A step reads each weight once: as many different ones follow one another as no cache holds."""

MOST_COPIES = 256
"""Copies of weights so small that a step has them in its cache anyway."""
GATED = "gate and up"
"""The one product that an activation goes with."""


def products_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's products, and of the head."""
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "qkv": (q_rows + 2 * kv_rows, spec.hidden_size),
        "output": (spec.hidden_size, q_rows),
        GATED: (spec.activation.width * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "head": (spec.vocab_size, spec.hidden_size),
    }


def bench_linear(
    setting: Setting, rows: Sequence[int] = ROWS, uncached_bytes: int = UNCACHED_BYTES
) -> Iterator[Result]:
    for name, (outputs, inputs) in products_of(setting.spec).items():
        weight_bytes = outputs * inputs * setting.weight_bytes
        copies = min(MOST_COPIES, -(-uncached_bytes // weight_bytes))
        yield from _timed_product(setting, name, (outputs, inputs), copies, rows)


@torch.inference_mode()
def _timed_product(
    setting: Setting, name: str, shape: tuple[int, int], copies: int, rows: Sequence[int]
) -> list[Result]:
    outputs, inputs = shape
    linears = setting.linears()
    products: list[Linear] = []
    for _ in range(copies):
        weight = torch.randn(outputs, inputs).to(setting.dtype)
        activation = setting.spec.activation
        products.append(linears.activated(weight, None, activation) if name == GATED else linears.linear(weight))
    found = []
    for count in rows:
        x = torch.randn(count, inputs).to(setting.dtype)

        def one_after_another(x: torch.Tensor = x) -> None:
            with setting.step():
                for product in products:
                    product(x)

        work = Work(
            bytes=float(outputs * inputs * setting.weight_bytes),
            operations=2.0 * count * outputs * inputs,
        )
        found.append(
            setting.result(
                "linear", f"{name}, {count} rows", work, timed(one_after_another, setting.repeats, per_call=copies)
            )
        )
    return found
