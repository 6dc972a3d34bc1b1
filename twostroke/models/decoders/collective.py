"""The operations between the processes of a worker, where each of them computes a share of a model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from twostroke.kernels.cpu.forward import NativeCollective
from twostroke.scheduler.batch import Batch


class Collective(Protocol):
    """All processes call the same methods in the same order, with tensors of the same shapes.

    Raises EngineLost where one of them does not respond any more.
    """

    @property
    def native(self) -> NativeCollective | None:
        """The collective that native kernels use, which add up by themselves; None without such kernels."""

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Returns the context in which a step is computed. On the first process, it sends the step to the others."""

    def close(self) -> None:
        """Ends the operations with the other processes."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all processes' parts, with the same bits on each. On CPUs they are added in the processes'
        order in float32.

        The sum may overwrite `part`.
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
