"""Local prefill: the pure choice of a prompt that a decode worker computes instead of waiting for its page source.

A source computes pulls in order of arrival. Those at the end of its queue wait, while the decode worker itself may be
idle or have room beside its streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from twostroke.scheduler.cost import Budget, Queued

ANSWER_S = 0.03
"""Seconds within which a source announces pages that it has cached."""


class WaitingPull(Protocol):
    """A pull that has not ended."""

    @property
    def source(self) -> str: ...

    @property
    def started_s(self) -> float: ...

    @property
    def missing_blocks(self) -> int: ...

    @property
    def has_begun(self) -> bool:
        """Whether the source has announced pages."""

    @property
    def is_computable(self) -> bool:
        """Whether all blocks before the first missing one are here, and no other sequence waits for missing ones."""


AnyPull = TypeVar("AnyPull", bound=WaitingPull)


@dataclass(frozen=True, slots=True)
class PrefillSpeeds:
    """Speed of prompt computation, here and at the source."""

    chunk_blocks: int
    """Blocks that the source computes in one step: this many at the head of its queue may be under way."""
    source_s: float
    """Seconds per block at a source that does nothing else."""
    local_s: float
    """Seconds per block here, beside the running streams."""

    @classmethod
    def beside(
        cls, streams: int, context_tokens: int, *, budget: Budget, chunk_tokens: int, block_size: int
    ) -> PrefillSpeeds:
        """Returns the speeds beside streams that attend to `context_tokens`. Steps are taken to cost the same at the
        source as here."""
        there, here = Queued(chunk_tokens), Queued(chunk_tokens, 0.0, streams, context_tokens)
        source_s, local_s = (budget.drain_s(chunk, chunk_tokens) / chunk_tokens for chunk in (there, here))
        return cls(-(-chunk_tokens // block_size), block_size * source_s, block_size * local_s)


def choose(pulls: Sequence[AnyPull], pace: PrefillSpeeds, now_s: float) -> AnyPull | None:
    """Returns the oldest pull that its source has not begun and that would be done sooner here, if any.

    The source must have other work for as long: streams here are not slowed down for a source that would be idle.
    """
    in_all: Counter[str] = Counter()
    for pull in pulls:
        in_all[pull.source] += pull.missing_blocks
    ahead: Counter[str] = Counter()
    for pull in pulls:
        source = pull.source
        is_waiting = not pull.has_begun and ahead[source] >= pace.chunk_blocks
        ahead[source] += pull.missing_blocks
        if not is_waiting or not pull.is_computable or now_s - pull.started_s < ANSWER_S:
            continue
        local_s = pull.missing_blocks * pace.local_s
        waits_s, others_s = (blocks * pace.source_s for blocks in (ahead[source], in_all[source] - pull.missing_blocks))
        if local_s <= min(waits_s, others_s):
            return pull
    return None
