"""The sequences that wait for pages, and sums of the work that a scheduler has, for predictions and for routers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.cost import Queued
from twostroke.scheduler.lateness import DuePrompt
from twostroke.scheduler.progress import BlockProgress
from twostroke.scheduler.running import Need, RunningSequences
from twostroke.scheduler.sequence import Sequence

ADMISSION_LOOKAHEAD = 16
"""Waiting sequences that one admission round looks at: short ones can pass, and it is cheap enough for every step."""

DUE_LOOKAHEAD = 64
"""Running prompts that predictions of first tokens look at."""


class WaitingQueue:
    def __init__(self) -> None:
        self._sequences: deque[Sequence] = deque()
        self.pending_tokens = 0
        self.pending_pairs = 0.0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def append(self, sequence: Sequence) -> None:
        """Appends a sequence; one that has emitted tokens goes before all that have not: its client is reading."""
        begun = itertools.takewhile(lambda other: other.answer_tokens, self._sequences)
        self._sequences.insert(sum(1 for _ in begun) if sequence.answer_tokens else len(self), sequence)
        self._count(sequence, 1)

    def append_first(self, sequences: Iterable[Sequence]) -> None:
        """Puts the sequences before all others, in this order."""
        for sequence in reversed(list(sequences)):
            self._sequences.appendleft(sequence)
            self._count(sequence, 1)

    def take_first(self) -> Sequence:
        sequence = self._sequences.popleft()
        self._count(sequence, -1)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, change: int) -> None:
        self.pending_tokens += change * sequence.pending_tokens
        self.pending_pairs += change * sequence.pending_pairs


class SchedulerLoad:
    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSequences,
        pool: BlockPool,
        progress: BlockProgress,
        block_size: int,
    ) -> None:
        """`waiting` and `running` are the scheduler's own, which change."""
        self._waiting = waiting
        self._running = running
        self._pool = pool
        self._progress = progress
        self._block_size = block_size

    @property
    def prompts(self) -> int:
        """Sequences that wait for their first token, or for their pages where nothing is sampled."""
        return len(self._waiting) + self._running.work.prompts

    def due_prompts(self) -> Iterator[DuePrompt]:
        """Yields the prompts that are computed here, about in that order, without those far back."""
        for sequence in itertools.islice(self._runnable(), DUE_LOOKAHEAD):
            start, known = sequence.computed, len(sequence.known)
            if start < known <= sequence.prompt_tokens and self._progress.runnable_end(sequence, start + 1) > start:
                tokens = known - start
                yield DuePrompt(tokens, tokens * (start + tokens / 2), sequence.due_s)
        for sequence in itertools.islice(self._waiting, ADMISSION_LOOKAHEAD):
            yield DuePrompt(sequence.pending_tokens, sequence.pending_pairs, sequence.due_s)

    def lone_streams(self) -> tuple[int, int] | None:
        """Returns the streams and the tokens that they attend to, or None if the next step may run anything else."""
        streams = context_tokens = 0
        for sequence in itertools.chain(self._runnable(), self._running.of(Need.STREAM)):
            first = sequence.next_start
            if sequence.answer_tokens and len(sequence.known) - first <= 1:
                streams += 1
                context_tokens += len(sequence.known)
            elif self._progress.runnable_end(sequence, len(sequence.known)) > first:
                return None
        return (streams, context_tokens) if streams else None

    @property
    def queued_tokens(self) -> int:
        """Tokens known but not computed, without those that a pull is writing; equal blocks count once."""
        return self.queued().all_tokens

    def queued(self) -> Queued:
        """Returns the queued work."""
        size, unwritten, running = self._block_size, self._pool.unwritten, self._running.work
        tokens = self._waiting.pending_tokens + unwritten.blocks * size + running.tokens
        pairs = self._waiting.pending_pairs + (unwritten.depths + unwritten.blocks / 2) * size**2 + running.pairs
        return Queued(tokens, pairs, running.streams, running.context_tokens, running.stream_tokens)

    def _runnable(self) -> Iterator[Sequence]:
        """Yields the running sequences that may run next and are no streams."""
        return itertools.chain.from_iterable(map(self._running.of, (Need.TOKEN, Need.TAIL, Need.PROMPT)))
