"""How many drafted tokens each stream runs: as long as another one is expected to save more time than it costs.

A step of t seconds makes n tokens known. One more row takes s seconds, and makes a token known with the chance p that
it and the drafted tokens before it are right. Tokens per second grow by it where p / s > n / t; taken in the order of
their chances, rows are added until that no longer holds, which is the greatest sum of tokens per second there is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as ListOf

from twostroke.scheduler.batching import Chunk, terms_of
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.scheduler.progress import BlockProgress
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import SchedulerLimits
from twostroke.speculation.draft import NOTHING, Draft
from twostroke.speculation.speculation import Price

MOST_HARM = 1.5
"""Times as long as without drafts that a step may take where some of its streams have none: their tokens come later."""


class Drafting:
    def __init__(self, progress: BlockProgress, limits: SchedulerLimits) -> None:
        self._progress = progress
        self._limits = limits

    def with_drafts(self, chunks: list[Chunk], cost: StepCost, most: int) -> list[Chunk]:
        """Put up to `most` drafted tokens in all behind the last tokens of streams; return the chunks."""
        asking = [index for index, chunk in enumerate(chunks) if _may_draft(chunk)]
        if not asking or most <= 0:
            return chunks
        drafts = [self._draft(chunks[index].sequence) for index in asking]
        step = terms_of(chunks)
        lengths = draft_lengths(drafts, cost, step, most)
        price = Price(cost.stream_s, cost.of(step) / step.streams)
        for index, draft, length in zip(asking, drafts, lengths, strict=True):
            sequence = chunks[index].sequence
            if length:
                assert sequence.speculation is not None
                sequence.speculation.runs(price)
                chunks[index] = chunks[index]._replace(drafts=draft.tokens[: self._fitting(sequence, length)])
        return chunks

    def _draft(self, sequence: Sequence) -> Draft:
        """Return what may come next of a stream, as far as its answer goes on behind each of the tokens."""
        params, limits, most = sequence.sampling, self._limits, most_drafted(sequence, self._limits)
        assert params is not None
        assert sequence.speculation is not None
        if most <= 0:
            return NOTHING
        draft = sequence.speculation.propose(sequence.known, most)
        ends = {*limits.eos_token_ids, *params.stop_token_ids}
        length = next((rank for rank, token in enumerate(draft.tokens) if token in ends), len(draft.tokens))
        if sequence.grammar is not None and length:
            length = sequence.grammar.permitted_prefix(draft.tokens[:length])
        return Draft(draft.tokens[:length], draft.chances[:length])

    def _fitting(self, sequence: Sequence, wanted: int) -> int:
        """Return how many of `wanted` tokens fit behind the known ones, in pages that it has or can have now."""
        block_size, known = self._limits.block_size, len(sequence.known)
        while len(sequence.pages) * block_size < known + wanted and self._progress.grow(sequence):
            pass
        return min(wanted, len(sequence.pages) * block_size - known)


def _may_draft(chunk: Chunk) -> bool:
    return chunk.sequence.speculation is not None and chunk.samples and chunk.end - chunk.start == 1


def most_drafted(sequence: Sequence, limits: SchedulerLimits) -> int:
    """Return how many drafted tokens may run behind the known ones of a stream."""
    params, known = sequence.sampling, len(sequence.known)
    assert params is not None, "a stream samples"
    most = min(params.max_tokens - sequence.answer_tokens, limits.max_model_len - known) - 1
    if limits.has_exact_blocks:  # a block is stored when its last token runs, which has to be the right one
        most = min(most, limits.block_size - known % limits.block_size - 1)
    if sequence.grammar is not None:  # each drafted token needs a mask
        most = min(most, sequence.grammar.most_drafts)
    return most


def longest_step_s(proposed: int, cost: StepCost, step: StepTerms) -> float:
    """Return how long drafts may make a step where `proposed` of its streams have some: the others gain nothing."""
    return math.inf if proposed >= step.streams else MOST_HARM * cost.of(step)


def draft_lengths(drafts: ListOf[Draft], cost: StepCost, step: StepTerms, most: int) -> list[int]:
    """Return how many leading tokens of each draft to run in a step that costs `step` without them, `most` in all."""
    lengths = [0] * len(drafts)
    seconds, tokens = cost.of(step), float(step.streams)
    if seconds <= 0:
        return lengths  # nothing is known of costs
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
