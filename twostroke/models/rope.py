"""Rotary positions, from a spec's numbers to tables."""

from __future__ import annotations

import torch

from twostroke.models.spec import RopeSpec


def rope_tables(rope: RopeSpec, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each float32 [positions, head_dim / 2]."""
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * rope.attention_scaling, angles.sin() * rope.attention_scaling
