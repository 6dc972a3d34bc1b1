"""Decides for each sequence which blocks it may compute, which it writes, and which it passes over.

A sequence waits for a block that has another writer, and passes over a block that is filled.
"""

from __future__ import annotations

from typing import Protocol

from twostroke.base.ids import PageId
from twostroke.kv_cache.parts import Part, parts_of
from twostroke.kv_cache.pool import BlockPool, Claim
from twostroke.scheduler.sequence import Sequence


class BlockProgress(Protocol):
    """What a scheduler asks of the blocks of a sequence."""

    @property
    def pages_tell_all(self) -> bool:
        """Whether only its own steps and changes of its next block's page can make a sequence runnable.

        If not, all prompts are looked at after each change of the pool.
        """

    def is_blocked(self, sequence: Sequence) -> bool:
        """Returns whether another writer fills the next block. Called only where that block has a hash."""

    def may_begin(self, sequence: Sequence) -> bool:
        """Returns whether a waiting sequence would find all that it needs besides pages."""

    def begin(self, sequence: Sequence, claim: Claim) -> list[Part]:
        """Gives a sequence its claim; returns the parts that have no writer, in order."""

    def catch_up(self, sequence: Sequence) -> bool:
        """Advances `computed` over blocks that others have filled; returns whether it has found more of them filled."""

    def runnable_end(self, sequence: Sequence, end: int) -> int:
        """Returns `end`, or an earlier one before a block that is filled or written by another."""

    def take(self, sequence: Sequence, start: int, end: int) -> int:
        """Takes what a chunk needs besides pages; returns its end, which is earlier where there is too little."""

    def begin_writing(self, sequence: Sequence, start: int, end: int) -> None:
        """Makes the sequence the writer of what its chunk computes."""

    def make_readable(self, sequence: Sequence, end: int) -> None:
        """Makes blocks readable that a forward pass up to `end` has completed."""

    def grow(self, sequence: Sequence) -> bool:
        """Gives a sequence one more block; returns False if there is no room."""

    def recomputed_tokens(self, sequence: Sequence) -> int:
        """Returns the number of tokens that are to be computed again although the pages of their blocks are filled."""

    def pull_to(self, sequence: Sequence, depth: int) -> list[Part]:
        """Prepares for a pull that ends after `depth` blocks; returns the parts of these that have no writer."""

    def release(self, sequence: Sequence) -> None:
        """Releases all that a sequence holds."""


class PageProgress:
    """Blocks that have one page each."""

    pages_tell_all = True

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def is_blocked(self, sequence: Sequence) -> bool:
        return self.has_other_writer(sequence, sequence.pages[sequence.computed // self._block_size])

    def may_begin(self, sequence: Sequence) -> bool:
        return True

    def begin(self, sequence: Sequence, claim: Claim) -> list[Part]:
        sequence.pages = claim.pages
        sequence.computed = claim.hits * self._block_size
        return parts_of(claim.missing)

    def catch_up(self, sequence: Sequence) -> bool:
        first = block = sequence.computed // self._block_size
        while block < len(sequence.block_hashes) and self._pool.is_filled(sequence.pages[block]):
            block += 1
            sequence.computed = block * self._block_size
        return block > first

    def runnable_end(self, sequence: Sequence, end: int) -> int:
        size = self._block_size
        first, last = sequence.computed // size, min(-(-end // size), len(sequence.block_hashes))
        block = self._pool.end_of_open(sequence.pages, first, last, sequence.session)
        return block * size if block < last else end

    def take(self, sequence: Sequence, start: int, end: int) -> int:
        return end

    def begin_writing(self, sequence: Sequence, start: int, end: int) -> None:
        pages = sequence.pages[start // self._block_size : -(-end // self._block_size)]
        self._pool.assign_unwritten(pages, sequence.session)

    def make_readable(self, sequence: Sequence, end: int) -> None:
        size = self._block_size
        sequence.extend_hashes(size, end)
        first, last, pool = sequence.computed // size, end // size, self._pool
        pages = sequence.pages[first:last]
        arriving = [page for page in pages if pool.is_arriving(page)]
        if arriving:
            pool.fill_all(arriving)
        if len(arriving) < len(pages):
            for block, page in enumerate(pages, first):
                if not pool.is_filled(page):
                    pool.register_private(page, sequence.block_hashes[block], sequence.parent_of(block))

    def grow(self, sequence: Sequence) -> bool:
        page = self._pool.claim_private()
        if page is not None:
            sequence.pages.append(page)
        return page is not None

    def recomputed_tokens(self, sequence: Sequence) -> int:
        return 0

    def pull_to(self, sequence: Sequence, depth: int) -> list[Part]:
        pages = enumerate(sequence.pages[: min(depth, len(sequence.block_hashes))])
        return parts_of(block for block, page in pages if self._pool.is_unwritten(page))

    def release(self, sequence: Sequence) -> None:
        for page in sequence.pages[sequence.computed // self._block_size :]:  # those before are filled
            if self._pool.writer(page) == sequence.session:
                self._pool.clear_writer(page)
        self._pool.release(sequence.pages)
        sequence.pages = []

    def has_other_writer(self, sequence: Sequence, page: PageId) -> bool:
        return self._pool.writer(page) not in (None, sequence.session)
