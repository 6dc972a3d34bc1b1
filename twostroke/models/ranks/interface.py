"""What a model of one rank asks of the other ranks of its worker."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from twostroke.kernels.cpu.forward import NativeRanks
from twostroke.scheduler.batch import Batch


class Ranks(Protocol):
    """All ranks call the same methods in the same order, with tensors of the same shapes.

    Raises EngineLost where one of them does not answer any more.
    """

    @property
    def native(self) -> NativeRanks | None:
        """The same for native kernels, which add up on their own."""

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Returns what a step is computed within: the first rank tells the others what to compute."""

    def close(self) -> None:
        """Ends the meetings with the other ranks."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' parts, the same on each; on CPUs added in the order of ranks in float32.

        It may be made in the place of `part`.
        """

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """Returns the columns of all ranks' parts [rows, columns] side by side on the first rank, None on the
        others."""


class OneRank:
    """A worker that computes whole models."""

    @property
    def native(self) -> NativeRanks | None:
        return None

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Closes nothing: there is no other rank."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        return part
