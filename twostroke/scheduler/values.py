"""What a scheduler is given and what it returns, besides steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from twostroke.kv_cache.parts import Part
from twostroke.request import FinishReason, SampledToken
from twostroke.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the model and the role, besides the configuration."""

    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    align_chunks: bool
    """End chunks on block boundaries, so that every chunk finishes the blocks it began (prefill workers)."""
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class AdmittedSequence:
    """A sequence that got its pages."""

    sequence: Sequence
    missing: list[Part]
    """Parts without a writer, in order. They are computed, unless they are pulled or loaded."""


class Emission(NamedTuple):
    """A token that became known, or the failure of an answer. It is a tuple because one is made for every token."""

    sequence: Sequence
    token: SampledToken
    finish: FinishReason | None
    """Reason of the end, if it ended. ERROR: there is no token, as its logits were not finite or its reader failed."""
