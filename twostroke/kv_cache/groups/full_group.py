"""The group of the layers that attend to all tokens: its pages are those of whole chains of blocks.

The least recently used leaf of the chains is evicted first, so that a block is evicted only after those that follow
it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.groups.group_pool import GroupPool, PoolListener
from twostroke.kv_cache.groups.page_state import UNHELD_BLOCKS, PageState


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A cached or pinned block, without holders."""

    hash: BlockHash
    parent: BlockHash
    last_used: int
    """Logical time of the last release."""


class FullGroup(GroupPool):
    """The pages of chains of blocks."""

    def __init__(self, total: int, listener: PoolListener) -> None:
        super().__init__([], total, listener)
        self._children: dict[BlockHash, int] = {}
        """Hashed pages per parent hash, whether or not the parent itself is here."""
        self._leaves: list[tuple[int, PageId]] = []
        """Heap of (last_used, page) of evictable leaves; entries may be stale."""
        self._clock = 0
        self.gains = 0
        """How often a page became available, or a block got a page: each may bring a claim closer by one page."""

    # Queries

    @property
    def available(self) -> int:
        """Pages that a claim can get: free ones and cached ones."""
        return self._counts[PageState.FREE] + self._counts[PageState.CACHED]

    @property
    def pinned_blocks(self) -> int:
        """Distinct blocks that pins keep, whether or not they are here."""
        return len(self._pins)

    def is_coming(self, block_hash: BlockHash) -> bool:
        """Returns whether the bytes of this block are being written now."""
        page = self._by_hash.get(block_hash)
        return page is not None and self._pages[page].writer is not None

    def parent_of(self, block_hash: BlockHash) -> BlockHash | None:
        """Returns the parent of a block with a readable page here, else None."""
        page = self.find(block_hash)
        return None if page is None else self._pages[page].parent

    def depth(self, hashes: Sequence[BlockHash]) -> int:
        """Returns how many leading blocks are filled here."""
        for index, block_hash in enumerate(hashes):
            if self.find(block_hash) is None:
                return index
        return len(hashes)

    def shortage(self, hashes: Sequence[BlockHash], private: int) -> int | None:
        """Returns how many blocks `claim` would evict now, or None if there are too few pages for it. O(blocks)."""
        held = [self._by_hash.get(block_hash) for block_hash in hashes]
        taken = held.count(None) + private
        return max(0, taken - self._counts[PageState.FREE]) if taken <= self._takeable(held) else None

    def claimable_at(self, hashes: Sequence[BlockHash], private: int) -> int:
        """Returns the value of `gains` before which such a claim cannot succeed. O(blocks)."""
        held = [self._by_hash.get(block_hash) for block_hash in hashes]
        return self.gains + max(0, held.count(None) + private - self._takeable(held))

    def cached(self) -> list[CachedBlock]:
        """Returns the cached and pinned blocks in no order. O(pages)."""
        return [
            CachedBlock(record.hash, record.parent, record.last_used)
            for _, record in self._records()
            if record.state in UNHELD_BLOCKS and record.hash is not None and record.parent is not None
        ]

    # Holding and releasing

    def claim_private(self) -> PageId | None:
        """Returns one more page for a growing sequence, or None if there is none."""
        return self._take_private() if self.available else None

    def share_filled(self, hashes: Mapping[int, BlockHash]) -> dict[int, PageId]:
        shared: dict[int, PageId] = {}
        for block, block_hash in hashes.items():
            page = self.find(block_hash)
            if page is not None:
                self._acquire(page)
                shared[block] = page
        return shared

    def unshare(self, pages: Collection[PageId]) -> None:
        self.release(pages)

    def release(self, pages: Iterable[PageId]) -> None:
        """Releases one hold on each page, last first: a block's children become evictable before it."""
        records = self._pages
        for page in reversed(list(pages)):
            record = records[page]
            if record.refs == 1 and record.filled:
                record.refs = 0
                self._keep(page)
            else:
                self._release(page)

    # Writing

    def register_private(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Registers a private page as a full block; it stays private if another page has that hash."""
        record = self._pages[page]
        assert record.state is PageState.ACTIVE, f"page {page} is {record.state.name}, not ACTIVE"
        assert record.hash is None, f"page {page} has a hash already"
        if block_hash in self._by_hash:
            return
        self._set_hash(page, block_hash, parent)
        record.filled = True
        self._listener.stored([block_hash])

    def forget(self, pages: Sequence[PageId]) -> None:
        """Forgets the cached and pinned blocks of a chain, last first, up to where another chain branches off."""
        for page in reversed(pages):
            record = self._pages[page]
            if record.state in UNHELD_BLOCKS and record.hash is not None and record.hash not in self._children:
                self._forget_page(page)

    # Pinning

    def unpin_blocks(self, hashes: Iterable[BlockHash]) -> None:
        unpinned = list(hashes)
        self.gains += len(unpinned)
        super().unpin_blocks(unpinned)

    # Internals

    def _takeable(self, held: Iterable[PageId | None]) -> int:
        """Returns how many pages a claim can get besides those that hold its blocks already."""
        woken = sum(1 for page in held if page is not None and self._pages[page].state is PageState.CACHED)
        return self.available - woken

    def _take_private(self) -> PageId:
        self._evict(1 - len(self._free))
        (page,) = self._take_free(1)
        self._move(page, PageState.ACTIVE)
        return page

    def _take_arriving(
        self, hashes: Sequence[BlockHash], missing: Sequence[int], root: BlockHash, first: int
    ) -> list[PageId]:
        """Takes a page for each of these blocks of a chain, which begins `first` blocks after its prompt."""
        records, by_hash, children = self._pages, self._by_hash, self._children
        self._evict(len(missing) - len(self._free))
        taken = self._take_free(len(missing))
        for index, page in zip(missing, taken, strict=True):
            block_hash, parent = hashes[index], hashes[index - 1] if index else root
            record = records[page]
            record.hash, record.parent, record.depth = block_hash, parent, first + index
            record.state = PageState.ARRIVING
            by_hash[block_hash] = page
            children[parent] = children.get(parent, 0) + 1
        self._counts[PageState.FREE] -= len(missing)
        self._counts[PageState.ARRIVING] += len(missing)
        self.gains += len(missing)
        self._unwritten_blocks += len(missing)
        self._unwritten_depths += sum(missing) + first * len(missing)
        return taken

    def _keep(self, page: PageId) -> None:
        record, counts = self._pages[page], self._counts
        self._clock += 1
        self.gains += 1
        record.last_used = self._clock
        counts[record.state] -= 1
        record.state = state = PageState.PINNED if record.hash in self._pins else PageState.CACHED
        counts[state] += 1
        if record.hash not in self._children:
            self._offer(page)

    def _forget(self, page: PageId) -> None:
        self.gains += 1
        super()._forget(page)

    def _offer(self, page: PageId) -> None:
        record = self._pages[page]
        assert record.hash is not None
        if record.state is PageState.CACHED and record.hash not in self._children:
            heapq.heappush(self._leaves, (record.last_used, page))
            if len(self._leaves) > 2 * self.total:
                self._leaves = [entry for entry in set(self._leaves) if self._is_fresh_leaf(*entry)]
                heapq.heapify(self._leaves)

    def _evict(self, count: int) -> None:
        """Frees `count` pages, that of the least recently used leaf first."""
        records, by_hash, children, evicted = self._pages, self._by_hash, self._children, list[BlockHash]()
        page: PageId | None = None
        while len(evicted) < count:
            if page is None or (self._leaves and self._leaves[0] < (records[page].last_used, page)):
                if page is not None:
                    self._offer(page)
                page = self._least_used()
            record = records[page]
            block_hash, parent = record.hash, record.parent
            assert block_hash is not None
            assert parent is not None
            self._listener.evicting(page, block_hash, parent)
            self._before_page_removal(block_hash, is_evicted=True)
            del by_hash[block_hash]
            record.hash = record.parent = None
            record.filled, record.is_end, record.state = False, False, PageState.FREE
            self._free.append(page)
            evicted.append(block_hash)
            page, others = None, children.pop(parent) - 1
            if others:
                children[parent] = others
            else:  # the parent is mostly the next victim: the heap is read only where another leaf is older
                above = by_hash.get(parent)
                page = above if above is not None and records[above].state is PageState.CACHED else None
        if page is not None:
            self._offer(page)
        if evicted:
            self._counts[PageState.CACHED] -= len(evicted)
            self._counts[PageState.FREE] += len(evicted)
            self._listener.removed(evicted)

    def _least_used(self) -> PageId:
        while self._leaves:
            last_used, page = heapq.heappop(self._leaves)
            if self._is_fresh_leaf(last_used, page):
                return page
        # No leaf left: every cached block has a child in use under a private copy of it. Any of them may go.
        cached = (page for page, record in self._records() if record.state is PageState.CACHED)
        return min(cached, key=lambda page: self._pages[page].last_used)

    def _is_fresh_leaf(self, last_used: int, page: PageId) -> bool:
        record = self._pages[page]
        if record.state is not PageState.CACHED or record.last_used != last_used:
            return False
        assert record.hash is not None
        return record.hash not in self._children

    def _forget_page(self, page: PageId) -> None:
        block_hash = self._pages[page].hash
        assert block_hash is not None
        self._before_page_removal(block_hash, is_evicted=False)
        self._forget(page)
        self._listener.removed([block_hash])
        self._listener.forgotten(block_hash)

    def _before_page_removal(self, block_hash: BlockHash, *, is_evicted: bool) -> None:
        """Called before a block without holders loses its page."""

    def _set_hash(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        record = self._pages[page]
        record.hash, record.parent = block_hash, parent
        self.gains += 1
        self._by_hash[block_hash] = page
        self._children[parent] = self._children.get(parent, 0) + 1

    def _drop_hash(self, page: PageId) -> None:
        record = self._pages[page]
        if record.hash is None:
            return
        assert record.parent is not None
        del self._by_hash[record.hash]
        parent, record.hash, record.parent = record.parent, None, None
        children = self._children.pop(parent) - 1
        if children:
            self._children[parent] = children
            return
        above = self._by_hash.get(parent)
        if above is not None:
            self._offer(above)

    # Check

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self._children == Counter(record.parent for _, record in self._records() if record.parent is not None)
        leaves = set(self._leaves)
        for page, record in self._records():
            if record.state is PageState.CACHED and record.hash is not None and record.hash not in self._children:
                assert (record.last_used, page) in leaves, f"cached leaf {page} can never be evicted"
