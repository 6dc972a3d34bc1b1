"""What a model asks of the other processes of its worker, where each of them computes a share of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from twostroke.kernels.cpu.forward import NativeCollective
from twostroke.scheduler.batch import Batch


class Collective(Protocol):
    """All processes call the same methods in the same order, with tensors of the same shapes.

    Raises EngineLost where one of them does not answer any more.
    """

    @property
    def native(self) -> NativeCollective | None:
        """The collective of native kernels, which add up on their own; None without such kernels."""

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Returns what a step is computed within: the first one tells the others what to compute."""

    def close(self) -> None:
        """Ends the meetings with the other processes."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all processes' parts, the same on each; on CPUs added in their order in float32.

        It may be made in the place of `part`.
        """

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """Returns the columns of all parts [rows, columns] side by side on the first process, None on the others."""


class Alone:
    """A worker that computes whole models."""

    @property
    def native(self) -> NativeCollective | None:
        return None

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Closes nothing: there is no other process."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        return part
