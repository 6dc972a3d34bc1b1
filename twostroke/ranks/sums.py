"""The `Collective` of a model (twostroke/models/decoders/collective.py), computed by a group of ranks."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from twostroke.ranks.group import RankGroup
from twostroke.scheduler.batch import Batch


class RankSums:
    def __init__(self, group: RankGroup, vocab_size: int) -> None:
        self._group = group
        self._vocab_size = vocab_size

    @property
    def native(self) -> RankGroup:
        return self._group

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Returns an empty context: the first rank has sent this step, and nothing is left to do around it."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Does nothing: the process of a further rank ends without closing anything."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' parts, [rows, hidden] on each. Raises RankLost."""
        values = part.float() if part.dtype == torch.float16 else part.contiguous()
        self._group.all_reduce(values)
        return values.to(part.dtype)

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """Returns the logits [rows, vocabulary] on the first rank, None on others. Raises RankLost."""
        return self._group.gather(part, self._vocab_size)
