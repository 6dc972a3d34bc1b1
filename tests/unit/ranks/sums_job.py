"""Ranks that sum numbers of torch, and so load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from twostroke.ranks.group import RankGroup
from twostroke.ranks.rank import RankJob


@dataclass(frozen=True, slots=True)
class Sums(RankJob):
    """Each step is a number."""

    def load(self, group: RankGroup) -> Callable[[Any], None]:
        def compute(value: float) -> None:
            add(group, value)

        return compute


def add(group: RankGroup, value: float) -> torch.Tensor:
    """Returns the sum of value * (rank + 1) over all ranks."""
    values = torch.full((5,), value * (group.rank + 1))
    group.all_reduce(values)
    return values
