"""Chooses the tokens of the next step by the demands of the sequences and what the token budget leaves for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as ListOf

from twostroke.scheduler.batch import MOST_EXTRA_LOGITS
from twostroke.scheduler.batching import Chunk, new_chunk
from twostroke.scheduler.branches import Extension
from twostroke.scheduler.cost import Budget, StepCost
from twostroke.scheduler.progress import BlockProgress
from twostroke.scheduler.running import RunningSequences, StepNeed
from twostroke.scheduler.sequence import Demand, Sequence
from twostroke.scheduler.values import SchedulerLimits


class ChunkChooser:
    def __init__(
        self,
        running: RunningSequences,
        progress: BlockProgress,
        limits: SchedulerLimits,
        extension: Extension | None,
        late: Container[Sequence],
        preempt: Callable[[Sequence], None],
    ) -> None:
        """`running` is the scheduler's own; `preempt` removes a sequence from it.

        A sequence in `late` runs in no step, because its next token is not known yet.
        """
        self._running = running
        self._progress = progress
        self._limits = limits
        self._extension = extension
        self._late = late
        self._preempt = preempt
        self._known_early: set[Sequence] = set()
        """Sequences with tokens that readers made known since the last step; some may need pages."""

    def became_known(self, sequence: Sequence) -> None:
        """Takes note that the reader of a sequence has made tokens known."""
        self._known_early.add(sequence)

    def choose(self, budget: Budget | None, step_tokens: int) -> list[Chunk]:
        """Chooses all sequences that need one token, then ends of prompts, then the rest in order of admission."""
        if self._known_early:
            self._grow_early()
        self._running.catch_up()
        streams = [sequence for sequence in self._running.with_need(StepNeed.STREAM) if sequence not in self._late]
        chunks = self._choose_streams(streams, step_tokens)
        cost = None if budget is None else budget.cost
        is_aligned = self._limits.align_chunks and step_tokens >= self._limits.block_size
        left, left_logits = step_tokens - len(chunks), MOST_EXTRA_LOGITS
        block_size = self._limits.block_size
        for need, sequence in self._others():
            if left <= 0:
                break
            demand = sequence.demand()
            is_cut = is_aligned and need is StepNeed.PROMPT and demand.ends_on_blocks
            if is_cut and left < block_size and demand.start % block_size == 0 and demand.least < block_size:
                continue  # what is left of the step ends within its next block
            if budget is not None and demand.most > 1 and not demand.is_stream:
                left, budget = min(left, _prompt_tokens_beside_streams(chunks, budget, demand.start)), None
            room = -(-left // demand.weight)
            if demand.logits:
                room = min(room, left_logits // demand.logits)
            chunk = self._chunk_of(sequence, demand, room, is_aligned=is_aligned)
            self._running.touch(sequence)  # its need may change: it writes blocks now, or others do
            if chunk is not None:
                left -= demand.weight * (chunk.end - chunk.start)
                left_logits -= demand.logits * (chunk.end - chunk.start)
                chunks.append(chunk)
        left = min(left_logits, step_tokens - sum([chunk.end - chunk.start for chunk in chunks]))
        return chunks if cost is None else self._extended(chunks, cost, left)

    def _others(self) -> Iterator[tuple[StepNeed, Sequence]]:
        """Yields the sequences that are not streams, the most urgent first, then in order of admission."""
        for need, sequences in [
            (need, self._running.with_need(need)) for need in (StepNeed.TOKEN, StepNeed.TAIL, StepNeed.PROMPT)
        ]:
            for sequence in sequences:
                if sequence not in self._late:
                    yield need, sequence

    def _extended(self, chunks: list[Chunk], cost: StepCost, most: int) -> list[Chunk]:
        """Returns the chunks with up to `most` proposed tokens after the last known ones of streams."""
        if self._extension is None or most <= 0:
            return chunks
        proposed = [
            index
            for index, (sequence, start, end, samples, _) in enumerate(chunks)
            if sequence.proposer is not None and samples and end - start == 1
        ]
        return self._extension.extended(chunks, proposed, cost, most, self._progress.grow) if proposed else chunks

    def _chunk_of(self, sequence: Sequence, demand: Demand, room: int, *, is_aligned: bool) -> Chunk | None:
        """Returns the next chunk of a sequence, of about `room` tokens at most; None where nothing may run yet."""
        start, known = demand.start, demand.start + demand.most
        end = start + max(demand.least, min(room, demand.most))
        end = self._progress.runnable_end(sequence, end)
        if end < known and demand.ends_on_blocks and is_aligned:
            end -= end % self._limits.block_size
        end = self._progress.take(sequence, start, end)
        if end <= start:
            return None
        self._progress.begin_writing(sequence, start, end)
        return Chunk(sequence, start, end, sequence.sampling is not None and end == known)

    def _choose_streams(self, streams: ListOf[Sequence], step_tokens: int) -> list[Chunk]:
        """Chooses sequences that run one token and draw the next, in order of admission."""
        block_size = self._limits.block_size
        chunks: list[Chunk] = []
        for sequence in streams:
            known = len(sequence.known)
            if len(sequence.pages) * block_size < known and not self._grow(sequence):
                continue
            if known == sequence.prompt_tokens:  # its last block may lack pages of further groups
                self._progress.take(sequence, known - 1, known)
            chunks.append(new_chunk((sequence, known - 1, known, True, ())))
            if len(chunks) >= step_tokens:
                break
        return chunks

    def _grow_early(self) -> None:
        """Claims the pages of tokens that readers have made known, maybe several at once."""
        block_size = self._limits.block_size
        for sequence in [each for each in self._running if each in self._known_early]:
            while len(sequence.pages) * block_size < len(sequence.known) and self._grow(sequence):
                pass
        self._known_early.clear()

    def _grow(self, sequence: Sequence) -> bool:
        """Claims a page; preempts the sequence admitted last until that works, even `sequence` itself.

        Only streams grow, before all others are chosen and in order of admission: the victim has not been chosen yet.
        """
        while sequence in self._running:
            if self._progress.grow(sequence):
                return True
            self._preempt(next(reversed(self._running)))
        return False


def _prompt_tokens_beside_streams(chunks: ListOf[Chunk], budget: Budget, context_tokens: int) -> int:
    """Returns how many prompt tokens, after `context_tokens` of their own, may run beside the streams of `chunks`."""
    contexts = [chunk.end for chunk in chunks if chunk.samples]
    return budget.prompt_tokens(len(contexts), sum(contexts), context_tokens) if contexts else sys.maxsize
