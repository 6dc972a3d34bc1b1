"""The running sequences by what each needs of the next step, and sums of their work.

A sequence is looked at again only after it was touched: by a step that it took part in, or since the page that it waits
for has changed. So a step costs what it does, however many prompts are open.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from twostroke.base.ids import PageId
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.progress import BlockProgress
from twostroke.scheduler.sequence import Sequence


class Need(enum.IntEnum):
    """What a running sequence needs of the next step; those before others are cheap, and their output begins."""

    STREAM = 0
    """One token, which goes to a page of its own, and a draw behind it."""
    TOKEN = 1
    """One token."""
    TAIL = 2
    """Less than a block, or tokens that are computed already."""
    PROMPT = 3
    """A block or more."""
    NOTHING = 4
    """Nothing: all is computed, or others write its next block."""


class Work(NamedTuple):
    """The work of a running sequence, or of all."""

    tokens: int = 0
    """Prompt tokens that are known, not computed, and in no block without a writer or with another one."""
    pairs: float = 0.0
    """Pairs of each of them and a token that it attends to."""
    streams: int = 0
    """Sequences with at most one token that is not computed."""
    context_tokens: int = 0
    """Tokens that those attend to."""
    stream_tokens: int = 0
    """Tokens of those that are not computed."""
    prompts: int = 0
    """Sequences without a first token."""


NO_WORK = Work()


class _Entry:
    """A running sequence, and the page that it waits for."""

    __slots__ = ("need", "number", "page", "sequence", "touched", "work")

    def __init__(self, sequence: Sequence, number: int, touched: dict[_Entry, None]) -> None:
        self.sequence = sequence
        self.number = number
        """Its place in the order of admission."""
        self.touched = touched
        """The entries to look at, of all sequences."""
        self.need: Need | None = None
        """None until it was looked at for the first time."""
        self.work = NO_WORK
        self.page: PageId | None = None
        """The page of its next block, while that is arriving."""

    def page_changed(self, part: Part) -> None:
        self.page = None
        self.touched[self] = None


class RunningSequences:
    """In order of admission. Only the scheduler changes it."""

    def __init__(self, pool: BlockPool, progress: BlockProgress, block_size: int) -> None:
        self._pool = pool
        self._progress = progress
        self._block_size = block_size
        self._entries: dict[Sequence, _Entry] = {}
        self._touched: dict[_Entry, None] = {}
        self._by_need: list[dict[Sequence, None]] = [{} for _ in Need]
        self._unordered: set[Need] = set()
        """Needs with sequences that came out of order."""
        self._work = list(NO_WORK)
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
        entry = self._entries[sequence] = _Entry(sequence, self._admitted, self._touched)
        self._touched[entry] = None

    def remove(self, sequence: Sequence) -> None:
        """Call it before the sequence releases its pages."""
        entry = self._entries.pop(sequence)
        self._touched.pop(entry, None)
        self._wait(entry, None)
        self._set_work(entry, NO_WORK)
        if entry.need is not None:
            del self._by_need[entry.need][sequence]

    def touch(self, sequence: Sequence) -> None:
        """Notes that its tokens, or what is computed of it, may have changed."""
        entry = self._entries.get(sequence)
        if entry is not None:
            self._touched[entry] = None

    def of(self, need: Need) -> dict[Sequence, None]:
        """Returns the sequences with this need, in order of admission."""
        self._look()
        if need in self._unordered:
            self._unordered.remove(need)
            entries = self._entries
            ordered = sorted(self._by_need[need], key=lambda sequence: entries[sequence].number)
            self._by_need[need] = dict.fromkeys(ordered)
        return self._by_need[need]

    @property
    def work(self) -> Work:
        """The work of all."""
        self._look()
        return Work(*self._work)

    def _look(self) -> None:
        """Looks at what was touched; at all prompts where pages do not tell of everything."""
        if not self._progress.tells:
            for entry in self._entries.values():
                if entry.need is not Need.STREAM:
                    self._touched[entry] = None
        if not self._touched:
            return
        touched = list(self._touched)
        self._touched.clear()
        for entry in touched:
            self._look_at(entry)

    def _look_at(self, entry: _Entry) -> None:
        sequence, size = entry.sequence, self._block_size
        is_hashed = sequence.computed // size < len(sequence.block_hashes)
        if is_hashed:
            catch_up(self._progress, sequence)
            is_hashed = sequence.computed // size < len(sequence.block_hashes)
        need = self._need_of(sequence, is_hashed=is_hashed)
        if need is not entry.need:
            self._move(entry, need)
        self._set_work(entry, self._work_of(sequence))
        self._wait(entry, sequence.computed // size if is_hashed else None)

    def _need_of(self, sequence: Sequence, *, is_hashed: bool) -> Need:
        tokens = len(sequence.known) - sequence.next_start
        if tokens <= 1 and not is_hashed and sequence.sampling is not None:
            return Need.STREAM
        if tokens <= 0 or (is_hashed and self._progress.is_blocked(sequence)):
            return Need.NOTHING
        if tokens <= 1:
            return Need.TOKEN
        is_tail = tokens < self._block_size or sequence.computed == len(sequence.known)
        return Need.TAIL if is_tail else Need.PROMPT

    def _move(self, entry: _Entry, need: Need) -> None:
        if entry.need is not None:
            del self._by_need[entry.need][entry.sequence]
        others = self._by_need[need]
        last = next(reversed(others), None)
        if last is not None and self._entries[last].number > entry.number:
            self._unordered.add(need)
        others[entry.sequence] = None
        entry.need = need

    def _set_work(self, entry: _Entry, work: Work) -> None:
        if work != entry.work:
            self._work = [total + new - old for total, new, old in zip(self._work, work, entry.work, strict=True)]
            entry.work = work

    def _work_of(self, sequence: Sequence) -> Work:
        """Returns its work. That in arriving blocks without a writer is counted by the pool."""
        known, computed = len(sequence.known), sequence.computed
        hashed = len(sequence.block_hashes) * self._block_size
        begun, tail = 0, known - computed
        if computed < hashed:
            begun, tail = self._begun_tokens(sequence) + self._progress.again_tokens(sequence), known - hashed
        prompts = int(known <= sequence.prompt_tokens)
        if known - computed <= 1:
            return Work(0, 0.0, 1, known, begun + tail, prompts)
        pairs = begun * (computed + begun / 2) + tail * (known - tail / 2)
        return Work(begun + tail, pairs, prompts=prompts)

    def _begun_tokens(self, sequence: Sequence) -> int:
        """Returns the uncomputed tokens of the blocks that a running sequence is writing."""
        block_size = self._block_size
        block = sequence.computed // block_size
        while block < len(sequence.block_hashes) and self._pool.writer(sequence.pages[block]) == sequence.session:
            block += 1
        return max(0, block * block_size - sequence.computed)

    def _wait(self, entry: _Entry, block: int | None) -> None:
        """Lets the page of this block, and no other, tell of its change."""
        page = None if block is None else entry.sequence.pages[block]
        if page == entry.page:
            return
        if entry.page is not None:
            self._pool.stop_waiting(entry.page, entry)
        entry.page = None
        if block is not None and page is not None and self._pool.is_arriving(page):
            self._pool.wait_for(page, entry, Part(block, GroupKind.FULL))
            entry.page = page


def catch_up(progress: BlockProgress, sequence: Sequence) -> None:
    """Lets a sequence pass over what others have filled."""
    before = sequence.computed
    progress.catch_up(sequence)
    if sequence.computed > before:
        for constraint in sequence.constraints:
            constraint.passed(sequence, before)
