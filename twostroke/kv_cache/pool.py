"""The block pool: all pages of one worker, in the groups of its model's layers.

The pool is the group of full attention, which every model has, and coordinates the other groups. A claim and its hits,
a pin, and what is removed together with a page concern all groups. All groups share one space of page ids: `group_of`
returns the group of a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.groups.full_group import FullGroup
from twostroke.kv_cache.groups.group_pool import FurtherGroup, GroupPool, MakeGroup, PoolListener
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.parts import GroupKind, Part


@dataclass(frozen=True, slots=True)
class Claim:
    """Pages for a sequence, one per block: first the hashed blocks, then private ones."""

    pages: list[PageId]
    missing: list[int]
    """Indices of hashed blocks that were not here. Their pages are arriving from now on, without a writer."""
    hits: int
    """Number of leading blocks after which a sequence can continue (`BlockPool.hits`)."""


class BlockPool(FullGroup):
    """All pages of a worker. One owner, one thread: the worker's event loop."""

    def __init__(
        self,
        total: int,
        listener: PoolListener,
        *others: MakeGroup,
    ) -> None:
        """`others` make the groups beside the first one."""
        super().__init__(total, listener)
        self.others: tuple[FurtherGroup, ...] = tuple(make(self._pages, self.parent_of) for make in others)
        """The groups beside the first one."""
        self.groups: tuple[GroupPool, ...] = (self, *self.others)
        """All groups, in the order of `parts.GroupKind`."""

    def group_of(self, page: PageId) -> GroupPool:
        """Returns the group that the page belongs to."""
        if not self.others:
            return self
        return next(group for group in self.groups if group.owns(page))

    @property
    def lacks_pinned(self) -> bool:
        """Whether something that a pin keeps, of any group, is not readable here. O(pinned blocks)."""
        return super().lacks_pinned or any(group.lacks_pinned for group in self.others)

    def hits(self, hashes: Sequence[BlockHash]) -> int:
        """Returns after how many of these blocks a sequence can continue, given the filled pages of every group."""
        depth, others, number, agreed = self.depth(hashes), self.others, 0, 0
        while agreed < len(others):
            reached = others[number].depth(hashes, depth)
            agreed = agreed + 1 if reached == depth else 1
            depth, number = reached, (number + 1) % len(others)
        return depth

    def claim(self, hashes: Sequence[BlockHash], root: BlockHash, private: int, *, first: int = 0) -> Claim | None:
        """Holds a page for each block of a chain after `root`, plus `private` pages without a hash, or none of them.

        `first` is the index of the first of these blocks in its prompt. Filled and arriving blocks are shared. Returns
        None if the pool has too few pages now.
        """
        held = [self._by_hash.get(block_hash) for block_hash in hashes]
        missing = [index for index, page in enumerate(held) if page is None]
        if len(missing) + private > self._takeable(held):
            return None
        hits = self.hits(hashes)
        for page in held:
            if page is not None:
                self._acquire(page)
        taken = iter(self._take_arriving(hashes, missing, root, first))
        pages = [next(taken) if page is None else page for page in held]
        pages.extend(self._take_private() for _ in range(private))
        return Claim(pages, missing, hits)

    def share_last(self, hashes: Sequence[BlockHash]) -> dict[Part, PageId]:
        """Holds the pages of other groups that a sequence needs to continue after this chain, as far as there is room.

        Pages that are not here are arriving. The caller holds the first group's pages of the chain. `unshare_last`
        releases the returned ones.
        """
        return {
            Part(block, GroupKind(number)): page
            for number, group in enumerate(self.others, 1)
            for block, page in group.share_last(hashes).items()
        }

    def unshare_last(self, held: Mapping[Part, PageId]) -> None:
        """Releases what `share_last` returned."""
        for group in self.others:
            group.unshare([page for _, page in sorted(held.items()) if group.owns(page)])

    # Pinning

    def has_room_to_pin(self, hashes: Sequence[BlockHash]) -> bool:
        """Returns whether a prefix can be pinned so that the longest sequence still fits into each other group."""
        return all(group.has_room_to_pin(hashes) for group in self.others)

    def pin(self, hashes: Sequence[BlockHash]) -> None:
        """Pins, in each group, the blocks that a sequence needs to continue after this prefix, whether or not they are
        here. `unpin` ends it."""
        for group in self.groups:
            group.pin_blocks(group.last_of(hashes))

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """Removes one pin of a prefix."""
        for group in self.groups:
            group.unpin_blocks(group.last_of(hashes))

    def unpin_all(self) -> None:
        """Removes every pin from every block."""
        for group in self.groups:
            group.unpin_blocks(list(group.pins_of_blocks().elements()))

    # Removing

    def forget_cached(self) -> int:
        """Forgets every cached block; returns how many had a page."""
        cached = [page for page, record in self._records() if record.state is PageState.CACHED]
        for page in cached:
            self._forget_page(page)
        self._leaves.clear()
        for group in self.others:
            group.forget_cached()
        return len(cached)

    def _before_page_removal(self, block_hash: BlockHash, *, is_evicted: bool) -> None:
        for group in self.others:
            group.page_removed(block_hash, is_evicted=is_evicted)

    def check_integrity(self) -> None:
        """Asserts every invariant of every group from first principles. O(pages); for tests and idle moments."""
        super().check_integrity()
        for group in self.others:
            group.check_integrity()
