"""When a decode worker computes a prompt itself instead of waiting for its page source: pure choice.

A source computes pulls in the order in which they came. Those at the end of its queue wait for the others, while the
decode worker's own compute may be idle, or has room beside its streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from twostroke.schedule.cost import Budget, Queued

ANSWER_S = 0.03
"""A source that has the pages in its cache has announced some of them by then."""


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
        """Its source has announced pages."""

    @property
    def is_computable(self) -> bool:
        """All blocks before the first missing one are here, and nobody else waits for those that are missing."""


AnyPull = TypeVar("AnyPull", bound=WaitingPull)


@dataclass(frozen=True, slots=True)
class Pace:
    """How prompts are computed, here and at the source."""

    chunk_blocks: int
    """Of one step of the source. What lies within the first of its queue may be under way."""
    source_s: float
    """Per block, at a source that does nothing else."""
    local_s: float
    """Per block, here, beside the streams that run."""

    @classmethod
    def beside(cls, streams: int, context_tokens: int, *, budget: Budget, chunk_tokens: int, block_size: int) -> Pace:
        """Here, that many streams run, which attend to `context_tokens`; the source's steps are like those here."""
        there, here = Queued(chunk_tokens), Queued(chunk_tokens, 0.0, streams, context_tokens)
        source_s, local_s = (budget.drain_s(chunk, chunk_tokens) / chunk_tokens for chunk in (there, here))
        return cls(-(-chunk_tokens // block_size), block_size * source_s, block_size * local_s)


def choose(pulls: Sequence[AnyPull], pace: Pace, now_s: float) -> AnyPull | None:
    """The oldest pull that its source has not begun, that would be done sooner here, and without which the source has
    work for as long as that takes: this worker's streams are slowed down for a source that is busy, not for one that
    would be idle.
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
