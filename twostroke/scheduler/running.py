"""The sequences that wait for pages and those that run, and sums of their work, for predictions and for routers.

A running sequence is looked at again only after it was touched: by a step that it took part in, or since the page that
it waits for has changed. So a step costs what it does, however many prompts are open. Where pages do not tell of
everything (not `BlockProgress.pages_tell_all`), all prompts are looked at once after each change of the pool.

Queries do not change sequences: a step in flight may be writing their blocks. Only `RunningSequences.catch_up`, between
two steps, advances sequences over blocks that others have filled.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from twostroke.base.ids import PageId
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.cost import Queued
from twostroke.scheduler.lateness import DuePrompt
from twostroke.scheduler.progress import BlockProgress
from twostroke.scheduler.sequence import Sequence

ADMISSION_LOOKAHEAD = 16
"""Waiting sequences that one admission round tries: short ones can pass longer ones, and every step can afford it."""


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
        """Appends a sequence. One that has emitted tokens is put before all that have not: its client is reading."""
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


class StepNeed(enum.IntEnum):
    """What a running sequence needs of the next step, the most urgent first: these are cheap and yield output."""

    STREAM = 0
    """One token, which goes to a page of its own, and a draw after it."""
    TOKEN = 1
    """One token."""
    TAIL = 2
    """Less than a block, or tokens that are computed already."""
    PROMPT = 3
    """A block or more."""
    NOTHING = 4
    """Nothing: all is computed, or others write its next block."""


class SequenceWork(NamedTuple):
    """The work of a running sequence, or of all."""

    tokens: int = 0
    """Prompt tokens to compute in blocks that the sequence writes. The pool counts arriving blocks without a writer."""
    pairs: float = 0.0
    """Pairs of each of them and a token that it attends to."""
    streams: int = 0
    """Sequences with at most one token that is not computed."""
    stream_tokens: int = 0
    """Known tokens of these streams that are not computed."""
    prompts: int = 0
    """Sequences without a first token."""

    def changed(self, old: SequenceWork, new: SequenceWork) -> SequenceWork:
        """Returns this sum with one of its summands replaced."""
        return SequenceWork(
            self.tokens + new.tokens - old.tokens,
            self.pairs + new.pairs - old.pairs,
            self.streams + new.streams - old.streams,
            self.stream_tokens + new.stream_tokens - old.stream_tokens,
            self.prompts + new.prompts - old.prompts,
        )


NO_WORK = SequenceWork()
STREAM_WORK = SequenceWork(streams=1, stream_tokens=1)
"""The work of a stream in every step but its first: it stays the same, only what it attends to grows."""


class _Entry:
    """A running sequence, and the page that it waits for."""

    __slots__ = ("context_tokens", "need", "number", "page", "sequence", "touch", "work")

    def __init__(self, sequence: Sequence, number: int, touch: Callable[[_Entry], None]) -> None:
        self.sequence = sequence
        self.number = number
        """The sequence's place in the order of admission."""
        self.touch = touch
        self.need: StepNeed | None = None
        """None until the first refresh."""
        self.work = NO_WORK
        self.context_tokens = 0
        """Tokens that it attends to as a stream."""
        self.page: PageId | None = None
        """The page of its next block, while that is arriving."""

    def pages_changed(self, parts: Collection[Part]) -> None:
        self.page = None
        self.touch(self)


class RunningSequences:
    """In order of admission. Only the scheduler changes it."""

    def __init__(self, pool: BlockPool, progress: BlockProgress, block_size: int) -> None:
        self._pool = pool
        self._progress = progress
        self._block_size = block_size
        self._entries: dict[Sequence, _Entry] = {}
        self._touched: dict[_Entry, None] = {}
        """Those to look at next."""
        self._to_catch_up: dict[_Entry, None] = {}
        """Those that may pass over blocks that others have filled."""
        self._seen_changes = 0
        """Number of changes of the pool at the latest refresh of all prompts."""
        self._by_need: list[dict[Sequence, None]] = [{} for _ in StepNeed]
        self._unordered: set[StepNeed] = set()
        """Needs with sequences that came out of order."""
        self._work = NO_WORK
        self.context_tokens = 0
        """Tokens that streams attend to, as of the latest refresh."""
        self._admitted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._entries

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._entries)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._entries)

    def add(self, sequence: Sequence) -> None:
        self._admitted += 1
        entry = self._entries[sequence] = _Entry(sequence, self._admitted, self._touch)
        self._touch(entry)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, before it releases its pages."""
        entry = self._entries.pop(sequence)
        self._touched.pop(entry, None)
        self._to_catch_up.pop(entry, None)
        self._wait(entry, None)
        self._set_work(entry, NO_WORK, 0)
        if entry.need is not None:
            del self._by_need[entry.need][sequence]

    def touch(self, sequence: Sequence) -> None:
        """Notes that its tokens, or what is computed of it, may have changed."""
        entry = self._entries.get(sequence)
        if entry is not None:
            self._touch(entry)

    def catch_up(self) -> None:
        """Lets sequences pass over what others have filled. No step may be in flight: they release what they pass."""
        for entry in list(self._to_catch_up) if self._progress.pages_tell_all else self._prompts():
            if _catch_up(self._progress, entry.sequence):
                self._touched[entry] = None
        self._to_catch_up.clear()

    def with_need(self, need: StepNeed) -> dict[Sequence, None]:
        """Returns the sequences with this need, in order of admission."""
        self._refresh_touched()
        if need in self._unordered:
            self._unordered.remove(need)
            entries = self._entries
            ordered = sorted(self._by_need[need], key=lambda sequence: entries[sequence].number)
            self._by_need[need] = dict.fromkeys(ordered)
        return self._by_need[need]

    @property
    def work(self) -> SequenceWork:
        """The work of all running sequences."""
        self._refresh_touched()
        return self._work

    def _touch(self, entry: _Entry) -> None:
        self._touched[entry] = None
        if entry.need is not StepNeed.STREAM:  # its blocks get their hashes when they are computed
            self._to_catch_up[entry] = None

    def _prompts(self) -> list[_Entry]:
        """Returns the entries that the work of other sequences may affect."""
        return [entry for entry in self._entries.values() if entry.need is not StepNeed.STREAM]

    def _refresh_touched(self) -> None:
        """Refreshes what was touched; all prompts where pages do not tell of everything and the pool has changed."""
        if not self._progress.pages_tell_all:
            changes = sum(group.changes for group in self._pool.groups)
            if changes != self._seen_changes:
                self._seen_changes = changes
                self._touched |= dict.fromkeys(self._prompts())
        if not self._touched:
            return
        size = self._block_size
        for entry in self._touched:
            sequence = entry.sequence
            known, computed = len(sequence.known), sequence.computed
            is_stream = entry.need is StepNeed.STREAM and entry.work is STREAM_WORK
            if is_stream and known - computed == 1 and computed // size >= len(sequence.block_hashes):
                self.context_tokens += known - entry.context_tokens
                entry.context_tokens = known
            else:
                self._refresh(entry)
        self._touched.clear()

    def _refresh(self, entry: _Entry) -> None:
        sequence, size = entry.sequence, self._block_size
        is_hashed = sequence.computed // size < len(sequence.block_hashes)
        need = self._need_of(sequence, is_hashed=is_hashed)
        if need is not entry.need:
            self._move(entry, need)
        work = self._work_of(sequence)
        self._set_work(entry, work, len(sequence.known) if work.streams else 0)
        self._wait(entry, sequence.computed // size if is_hashed else None)

    def _need_of(self, sequence: Sequence, *, is_hashed: bool) -> StepNeed:
        tokens = len(sequence.known) - sequence.next_start
        if tokens <= 1 and not is_hashed and sequence.sampling is not None:
            return StepNeed.STREAM
        if tokens <= 0 or (is_hashed and self._progress.is_blocked(sequence)):
            return StepNeed.NOTHING
        if tokens <= 1:
            return StepNeed.TOKEN
        is_tail = tokens < self._block_size or sequence.computed == len(sequence.known)
        return StepNeed.TAIL if is_tail else StepNeed.PROMPT

    def _move(self, entry: _Entry, need: StepNeed) -> None:
        if entry.need is not None:
            del self._by_need[entry.need][entry.sequence]
        others = self._by_need[need]
        last = next(reversed(others), None)
        if last is not None and self._entries[last].number > entry.number:
            self._unordered.add(need)
        others[entry.sequence] = None
        entry.need = need

    def _set_work(self, entry: _Entry, work: SequenceWork, context_tokens: int) -> None:
        self.context_tokens += context_tokens - entry.context_tokens
        entry.context_tokens = context_tokens
        if work != entry.work:
            self._work = self._work.changed(entry.work, work)
            entry.work = work

    def _work_of(self, sequence: Sequence) -> SequenceWork:
        """Returns its work. That in arriving blocks without a writer is counted by the pool."""
        known, computed = len(sequence.known), sequence.computed
        hashed = len(sequence.block_hashes) * self._block_size
        begun, tail = 0, known - computed
        if computed < hashed:
            begun, tail = self._begun_tokens(sequence) + self._progress.recomputed_tokens(sequence), known - hashed
        prompts = int(known <= sequence.prompt_tokens)
        if known - computed <= 1:
            work = SequenceWork(0, 0.0, 1, begun + tail, prompts)
            return STREAM_WORK if work == STREAM_WORK and sequence.sampling is not None else work
        pairs = begun * (computed + begun / 2) + tail * (known - tail / 2)
        return SequenceWork(begun + tail, pairs, prompts=prompts)

    def _begun_tokens(self, sequence: Sequence) -> int:
        """Returns the uncomputed tokens of the blocks that a running sequence is writing."""
        size, computed = self._block_size, sequence.computed
        first = computed // size
        block = self._pool.end_of_written(sequence.pages, first, len(sequence.block_hashes), sequence.session)
        return max(0, block * size - computed)

    def _wait(self, entry: _Entry, block: int | None) -> None:
        """Makes the entry wait for a change of this block's page, and of no other."""
        page = None if block is None else entry.sequence.pages[block]
        if page == entry.page:
            return
        if entry.page is not None:
            self._pool.stop_waiting(entry.page, entry)
        entry.page = None
        if block is not None and page is not None and self._pool.is_arriving(page):
            self._pool.wait_for(page, entry, Part(block, GroupKind.FULL))
            entry.page = page


def _catch_up(progress: BlockProgress, sequence: Sequence) -> bool:
    """Advances a sequence over blocks that others have filled; returns whether its need or work may have changed."""
    before = sequence.computed
    is_changed = progress.catch_up(sequence)
    if sequence.computed > before:
        for constraint in sequence.constraints:
            constraint.passed(sequence, before)
    return is_changed


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
        """Yields the prompts that are computed here, roughly in that order, without those far back in the queue."""
        for sequence in self._runnable():
            start, known = sequence.computed, len(sequence.known)
            if start < known <= sequence.prompt_tokens and self._progress.runnable_end(sequence, start + 1) > start:
                tokens = known - start
                yield DuePrompt(tokens, tokens * (start + tokens / 2), sequence.due_s)
        for sequence in itertools.islice(self._waiting, ADMISSION_LOOKAHEAD):
            yield DuePrompt(sequence.pending_tokens, sequence.pending_pairs, sequence.due_s)

    def lone_streams(self) -> tuple[int, int] | None:
        """Returns the streams and the tokens that they attend to, or None if the next step may run anything else.

        No step may be in flight.
        """
        self._running.catch_up()
        streams = context_tokens = 0
        for sequence in itertools.chain(self._runnable(), self._running.with_need(StepNeed.STREAM)):
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
        return Queued(tokens, pairs, running.streams, self._running.context_tokens, running.stream_tokens)

    def _runnable(self) -> Iterator[Sequence]:
        """Yields the running sequences that may run next and are not streams."""
        needs = (StepNeed.TOKEN, StepNeed.TAIL, StepNeed.PROMPT)
        return itertools.chain.from_iterable(map(self._running.with_need, needs))
