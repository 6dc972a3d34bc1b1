"""How sequences come on through their blocks: which blocks they may compute, write and pass over.

A block that somebody else writes is waited for, and one that is filled is passed over. `WindowProgress` does the same
where layers with a window keep their parts of blocks apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from twostroke.ids import PageId
from twostroke.kv_cache.pool import BlockPool, Claim
from twostroke.scheduler.sequence import Sequence


class BlockProgress(Protocol):
    """What a scheduler asks of the blocks of a sequence."""

    def may_begin(self, sequence: Sequence) -> bool:
        """Tell whether a sequence that waits would find all that it needs besides pages."""

    def begin(self, sequence: Sequence, claim: Claim) -> list[int]:
        """Give a sequence its claim; return the blocks whose window parts are to be pulled."""

    def catch_up(self, sequence: Sequence) -> None:
        """Advance `computed` over blocks that others have filled."""

    def runnable_end(self, sequence: Sequence, end: int) -> int:
        """Return `end`, or an earlier one before a block that is filled or written by another."""

    def take(self, sequence: Sequence, start: int, end: int) -> int:
        """Take what a chunk needs besides pages; return its end, earlier where there is less."""

    def begin_writing(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the sequence the writer of what its chunk computes."""

    def make_readable(self, sequence: Sequence, end: int) -> None:
        """Make blocks readable that a forward pass up to `end` has completed."""

    def grow(self, sequence: Sequence) -> bool:
        """Give a sequence one more block; return False if there is no room."""

    def again_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that are to be computed again, although the pages of their blocks are filled."""

    def pull_to(self, sequence: Sequence, depth: int) -> list[int]:
        """Prepare for a pull that ends after `depth` blocks; return the blocks whose window parts it is to bring."""

    def release(self, sequence: Sequence) -> None:
        """Release all that a sequence holds."""


class PageProgress:
    """Blocks that have one page each."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def may_begin(self, sequence: Sequence) -> bool:
        return True

    def begin(self, sequence: Sequence, claim: Claim) -> list[int]:
        sequence.pages = claim.pages
        sequence.computed = claim.hits * self._block_size
        return []

    def catch_up(self, sequence: Sequence) -> None:
        block = sequence.computed // self._block_size
        while block < len(sequence.block_hashes) and self._pool.is_filled(sequence.pages[block]):
            block += 1
            sequence.computed = block * self._block_size

    def runnable_end(self, sequence: Sequence, end: int) -> int:
        size = self._block_size
        for block in range(sequence.computed // size, min(-(-end // size), len(sequence.block_hashes))):
            page = sequence.pages[block]
            if self._pool.is_filled(page) or self.has_other_writer(sequence, page):
                return block * size
        return end

    def take(self, sequence: Sequence, start: int, end: int) -> int:
        return end

    def begin_writing(self, sequence: Sequence, start: int, end: int) -> None:
        for page in self._pages_of(sequence, start, end):
            if self._pool.is_arriving(page) and self._pool.writer(page) is None:
                self._pool.assign_writer(page, sequence.session)

    def make_readable(self, sequence: Sequence, end: int) -> None:
        size = self._block_size
        sequence.extend_hashes(size, end)
        for block in range(sequence.computed // size, end // size):
            page = sequence.pages[block]
            if self._pool.is_arriving(page):
                self._pool.fill(page)
            elif not self._pool.is_filled(page):
                self._pool.register_private(page, sequence.block_hashes[block], sequence.parent_of(block))

    def grow(self, sequence: Sequence) -> bool:
        page = self._pool.claim_private()
        if page is not None:
            sequence.pages.append(page)
        return page is not None

    def again_tokens(self, sequence: Sequence) -> int:
        return 0

    def pull_to(self, sequence: Sequence, depth: int) -> list[int]:
        return []

    def release(self, sequence: Sequence) -> None:
        for page in sequence.pages:
            if self._pool.writer(page) == sequence.session:
                self._pool.clear_writer(page)
        self._pool.release(sequence.pages)
        sequence.pages = []

    def has_other_writer(self, sequence: Sequence, page: PageId) -> bool:
        return self._pool.writer(page) not in (None, sequence.session)

    def _pages_of(self, sequence: Sequence, start: int, end: int) -> Iterable[PageId]:
        return sequence.pages[start // self._block_size : -(-end // self._block_size)]
