"""Decides how many drafted tokens each stream runs: one more as long as it is expected to save more time than it costs.

A step of t seconds makes n tokens known. One more row takes s seconds. It makes a token known with the probability p
that it and the drafted tokens before it are right. Tokens per second grow where p / s > n / t. Rows are added in the
order of p until that no longer holds. This gives the most tokens per second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from collections.abc import Sequence as ListOf

from twostroke.scheduler.batching import Chunk, terms_of
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import SchedulerLimits
from twostroke.speculation.draft import NOTHING, Draft
from twostroke.speculation.speculation import DraftPrice, Speculation

MOST_HARM = 1.5
"""Factor by which drafts may make a step longer if streams without drafts wait for it."""


class Drafting:
    """Puts drafted tokens after the last known ones of streams."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits

    def extended(
        self,
        chunks: list[Chunk],
        proposed: ListOf[int],
        cost: StepCost,
        most: int,
        grow: Callable[[Sequence], bool],
    ) -> list[Chunk]:
        drafting = [chunks[index].sequence for index in proposed]
        speculations = [each for sequence in drafting if (each := speculation_of(sequence)) is not None]
        drafts = [self._draft(*each) for each in zip(drafting, speculations, strict=True)]
        if not any(draft.tokens for draft in drafts):
            return chunks
        step = terms_of(chunks)
        lengths = draft_lengths(drafts, cost, step, most)
        price = DraftPrice(cost.stream_s, cost.of(step) / step.streams)
        for index, speculation, draft, length in zip(proposed, speculations, drafts, lengths, strict=True):
            if length:
                speculation.runs(price)
                fitting = self._fitting(chunks[index].sequence, length, grow)
                chunks[index] = chunks[index]._replace(proposed=draft.tokens[:fitting])
        return chunks

    def _draft(self, sequence: Sequence, speculation: Speculation) -> Draft:
        """Returns the proposed tokens of a stream that its answer permits."""
        params, limits, most = sequence.sampling, self._limits, most_drafted(sequence, self._limits)
        assert params is not None
        if most <= 0:
            return NOTHING
        draft = speculation.propose(sequence.known, most)
        ends = {*limits.eos_token_ids, *params.stop_token_ids}
        length = next((place for place, token in enumerate(draft.tokens) if token in ends), len(draft.tokens))
        for constraint in sequence.constraints if length else ():
            length = min(length, constraint.permitted(draft.tokens[:length]))
        return Draft(draft.tokens[:length], draft.chances[:length])

    def _fitting(self, sequence: Sequence, wanted: int, grow: Callable[[Sequence], bool]) -> int:
        """Returns how many of `wanted` tokens fit after the known ones. Claims pages for them if it can."""
        block_size, known = self._limits.block_size, len(sequence.known)
        while len(sequence.pages) * block_size < known + wanted and grow(sequence):
            pass
        return min(wanted, len(sequence.pages) * block_size - known)


def speculation_of(sequence: Sequence) -> Speculation | None:
    """Returns the speculation of a sequence. None where it has no drafter."""
    return sequence.proposer if isinstance(sequence.proposer, Speculation) else None


def most_drafted(sequence: Sequence, limits: SchedulerLimits) -> int:
    """Returns how many drafted tokens may run after the known ones of a stream."""
    params, known = sequence.sampling, len(sequence.known)
    assert params is not None, "a stream samples"
    most = min(params.max_tokens - sequence.answer_tokens, limits.max_model_len - known) - 1
    for constraint in sequence.constraints:
        most = constraint.most_ahead(sequence, most)
    return most


def longest_step_s(proposed: int, cost: StepCost, step: StepTerms) -> float:
    """Returns the longest step that drafts may cause where `proposed` of its streams gain from them."""
    return math.inf if proposed >= step.streams else MOST_HARM * cost.of(step)


def draft_lengths(drafts: ListOf[Draft], cost: StepCost, step: StepTerms, most: int) -> list[int]:
    """Returns how many leading tokens of each draft to run in a step that costs `step` without them, `most` in all."""
    lengths = [0] * len(drafts)
    seconds, tokens = cost.of(step), float(step.streams)
    if seconds <= 0:
        return lengths  # the costs are unknown
    longest_s = longest_step_s(sum([bool(draft.chances) for draft in drafts]), cost, step)
    chances = [(-draft.chances[0], index) for index, draft in enumerate(drafts) if draft.chances]
    heapq.heapify(chances)
    while chances and sum(lengths) < most:
        negative_chance, index = heapq.heappop(chances)
        if -negative_chance * seconds <= tokens * cost.stream_s or seconds + cost.stream_s > longest_s:
            break
        lengths[index] += 1
        tokens -= negative_chance
        seconds += cost.stream_s
        left = drafts[index].chances[lengths[index] :]
        if left:
            heapq.heappush(chances, (-left[0], index))
    return lengths
