"""Tables of rotary positions, from the numbers of a spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from twostroke.kernels.attention.rules import AttentionRule
from twostroke.models.spec import RopeSpec

MEAN_POSITIONS: Final = 4096
"""Positions over which `mean_rotation` takes the mean. Channels that turn once or more over them keep almost nothing of
a vector that is added to all keys."""


def rope_tables(ropes: Sequence[RopeSpec], positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines, each float32 [positions, ropes * head_dim / 2]: one rope after the other."""
    tables = [_tables_of(rope, positions) for rope in ropes]
    cosines, sines = zip(*tables, strict=True)
    return torch.cat(cosines, dim=1), torch.cat(sines, dim=1)


def _tables_of(rope: RopeSpec, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    scaling = torch.where(frequencies == 0, 1.0, rope.attention_scaling)
    return angles.cos() * scaling, angles.sin() * scaling


def mean_rotation(keys: torch.Tensor, ropes: Sequence[RopeSpec], rules: Sequence[AttentionRule]) -> torch.Tensor:
    """Returns the mean of keys, float64 [layers, kv_heads, head_dim], at the first `MEAN_POSITIONS` positions.

    Each layer's keys are rotated with the rope of its rule.
    """
    low, high = keys.chunk(2, dim=-1)
    tables = [[table.double().mean(0) for table in _tables_of(rope, MEAN_POSITIONS)] for rope in ropes]
    cosines, sines = (torch.stack([tables[rule.rope][which] for rule in rules])[:, None] for which in (0, 1))
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)
