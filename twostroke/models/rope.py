"""Rotary positions, from a spec's numbers to tables."""

from __future__ import annotations

from typing import Final

import torch

from twostroke.models.spec import RopeSpec

MEAN_POSITIONS: Final = 4096
"""Positions of a mean: channels that turn once or more on the way keep nothing of what is added to all keys."""


def rope_tables(rope: RopeSpec, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each float32 [positions, head_dim / 2]."""
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * rope.attention_scaling, angles.sin() * rope.attention_scaling


def mean_rotation(keys: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Return the mean of keys, float64 [..., head_dim], rotated to each of the first `MEAN_POSITIONS` positions."""
    low, high = keys.chunk(2, dim=-1)
    cosines, sines = (table.double().mean(0) for table in rope_tables(rope, MEAN_POSITIONS))
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)
