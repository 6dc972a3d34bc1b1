"""Changes weights so that the channels of keys have about the same size. Then one scale per token and head suits them
all.

Rows of the key projection that give large keys are divided by powers of two, and the same channels of queries are
multiplied. That rounds nothing: all scores keep their bits. Pages of plain numbers change only in exponents. Both
channels of a pair that rope rotates have one factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from twostroke.kernels.products.stored import Matrix, StoredMatrix
from twostroke.models.rope import mean_rotation
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.tensors import WeightSource

SMALLEST: Final = 1e-30
"""Least mean square of a channel. Smaller ones are raised to it, since their factor does not matter."""


def balanced(source: WeightSource, spec: ModelSpec, whole: WeightSource | None = None) -> WeightSource:
    """Returns the source of the same model with balanced keys: the source itself where keys have no bias.

    `whole` has the numbers of matrices where `source` has only their shapes. Raises what the sources raise.
    """
    if not spec.has_key_bias:
        return source
    factors = row_factors(source if whole is None else whole, spec)
    names = {key: f"model.layers.{key[0]}.self_attn.{key[1]}" for key in factors}
    return _ScaledRows(source, {names[key]: each for key, each in factors.items()})


def row_factors(source: WeightSource, spec: ModelSpec) -> dict[tuple[int, str], torch.Tensor]:
    """Returns the factors of rows by layer and projection; none where keys have no bias. Raises what the source
    does."""
    if not spec.has_key_bias:
        return {}
    factors, groups = {}, spec.heads // spec.kv_heads
    for layer, divisors in enumerate(_divisors(source, spec)):
        factors[layer, "q_proj"] = divisors.repeat_interleave(groups, dim=0).flatten()
        factors[layer, "k_proj"] = 1 / divisors.flatten()
    return factors


@dataclass(frozen=True, slots=True)
class _ScaledRows:
    source: WeightSource
    factors: Mapping[str, torch.Tensor]
    """Factors of the rows of a projection, by its name."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Raises what the source raises."""
        tensor, factors = self.source.take(name, *shape), self._factors(name)
        if factors is None or tensor.is_meta:
            return tensor
        return tensor * factors.to(tensor.device, tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))

    def take_matrix(self, name: str, rows: int, inputs: int) -> Matrix:
        """Raises what the source raises."""
        matrix, factors = self.source.take_matrix(name, rows, inputs), self._factors(name)
        if factors is None:
            return matrix
        return matrix.scaled(factors.float()) if isinstance(matrix, StoredMatrix) else self.take(name, rows, inputs)

    def _factors(self, name: str) -> torch.Tensor | None:
        return self.factors.get(name.rpartition(".")[0])


def _divisors(source: WeightSource, spec: ModelSpec) -> torch.Tensor:
    """Returns the divisors of key channels, powers of two: float64 [layers, kv_heads, head_dim]. Up to a head's median
    pair of channels they are 1."""
    rows, spreads, biases = spec.kv_heads * spec.head_dim, [], []
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        norm = source.take(f"{prefix}.input_layernorm.weight", spec.hidden_size).cpu().double()
        weight = source.take(f"{prefix}.self_attn.k_proj.weight", rows, spec.hidden_size).cpu().double()
        biases.append(source.take(f"{prefix}.self_attn.k_proj.bias", rows).cpu().double())
        spreads.append((weight * norm).square().sum(1))
    spread, bias = (torch.stack(each).view(-1, spec.kv_heads, spec.head_dim) for each in (spreads, biases))
    # the mean square of a key whose inputs have size 1, about the center that pages do not store
    power = spread + bias.square() - mean_rotation(bias, spec.ropes, spec.rules).square()
    low, high = power.chunk(2, dim=-1)
    size = (low + high).clamp(min=SMALLEST).sqrt()
    ratio = (size / size.median(dim=-1, keepdim=True).values).clamp(min=1)
    return torch.exp2(ratio.log2().round()).repeat(1, 1, 2)


def key_centers(source: WeightSource, spec: ModelSpec) -> torch.Tensor | None:
    """Returns the vectors that are subtracted from keys before these are stored with one scale per token and head.

    They are float32 [layers, kv_heads, head_dim] in host memory, or None where keys have no bias that only rope
    changes.

    Softmax does not change when the same vector is subtracted from all keys of a head. So attention over keys without
    their centers needs no correction, and a scale is not spent on what all keys have in common. That is the bias of
    their projection: channels that positions rotate slowly keep most of it.

    They are rounded to bfloat16, so that no machine's last bits of a mean change a page. Raises what the source raises.
    """
    if not spec.has_key_bias:
        return None
    rows = spec.kv_heads * spec.head_dim
    names = [f"model.layers.{layer}.self_attn.k_proj.bias" for layer in range(spec.layers)]
    biases = torch.stack([source.take(name, rows) for name in names]).cpu().double()
    centers = mean_rotation(biases.view(spec.layers, spec.kv_heads, spec.head_dim), spec.ropes, spec.rules)
    return centers.bfloat16().float()
