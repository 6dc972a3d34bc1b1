"""Sums of what ranks have made in the memory that they share, as native steps make them: for tests and benchmarks."""

from __future__ import annotations

import ctypes

import torch

from twostroke.kernels.cpu.build import Kernels
from twostroke.ranks.group import RankGroup

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class SharedPartials:
    def __init__(self, kernels: Kernels, group: RankGroup) -> None:
        self._group = group
        self._partial = kernels.function("twostroke_ranks_partial", (_POINTER, _NUMBER), _POINTER)
        of_partials = (_POINTER, _POINTER, _POINTER, _NUMBER)
        self._add = kernels.function("twostroke_ranks_add_partials", of_partials, ctypes.c_int32)

    def next(self, count: int) -> torch.Tensor:
        """Returns the place of this rank's next partial sum, float32, until `add`. A sum has to fit a slot."""
        address = self._partial(self._group.address, count)
        return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)

    def add(self, values: torch.Tensor) -> None:
        """Adds the sum of what all ranks have made in `next` to contiguous float32 values of its length."""
        self._group.check(self._add(self._group.address, None, values.data_ptr(), values.numel()))
