"""The block pool: all pages of one worker, their blocks, holders and writers.

    FREE         unused
    CACHED       a hashed block without holders; the least recently used leaf is evicted first
    PINNED       a hashed block without holders that a pin keeps: it is never evicted
    ARRIVING     a hashed block whose bytes are not there yet; requests with that prefix already share it
    ACTIVE       in use: filled and hashed, or private to the one sequence that is filling it
    QUARANTINED  without holders, but a transfer may still write to it

Always: free + cached + pinned + arriving + active + quarantined = total, and at most one page per block hash. An
arriving page has at most one writer (a pull or a computing sequence). When it gives up, the next sequence that waits
for the page may become its writer.

A pin marks a block hash, whether or not the block is here: a pinned block that is in use is ACTIVE or ARRIVING like any
other, and becomes PINNED where it would become CACHED.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twostroke.ids import BlockHash, PageId, SessionId
from twostroke.kv_cache.page_state import UNHELD_BLOCKS, PageState, check_record
from twostroke.kv_cache.pool_listener import PoolListener
from twostroke.kv_cache.window_parts import WindowListener, WindowParts, WindowShape


@dataclass(frozen=True, slots=True)
class Claim:
    """Pages for a sequence, one per block: first the hashed blocks, then private ones."""

    pages: list[PageId]
    missing: list[int]
    """Indices of hashed blocks that were not here: arriving from now on, without a writer."""
    hits: int
    """Leading blocks after which a sequence can go on (`BlockPool.hits`)."""


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Arriving blocks without a writer."""

    blocks: int
    depths: int
    """Sum of their indices in their chains."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A cached or pinned block, without holders."""

    hash: BlockHash
    parent: BlockHash
    last_used: int
    """Logical time of the last release."""


@dataclass(slots=True)
class _Page:
    state: PageState = PageState.FREE
    hash: BlockHash | None = None
    parent: BlockHash | None = None
    filled: bool = False
    refs: int = 0
    writer: SessionId | None = None
    depth: int = 0
    """Index of the block in its chain."""
    last_used: int = 0
    """Logical time of its last release."""


class BlockPool:
    """All pages of a worker. One owner, one thread: the worker's event loop."""

    def __init__(
        self,
        total: int,
        listener: PoolListener,
        window: WindowShape | None = None,
        window_listener: WindowListener | None = None,
    ) -> None:
        """`window`: a model whose layers with a window keep their parts of blocks apart from pages."""
        self.total = total
        self.windows: WindowParts | None = None
        if window is not None and window_listener is not None:
            self.windows = WindowParts(window, window_listener, self._parent_of)
        self._listener = listener
        self._pages = [_Page() for _ in range(total)]
        self._free: deque[PageId] = deque(PageId(page) for page in range(total))
        self._by_hash: dict[BlockHash, PageId] = {}
        self._children: Counter[BlockHash] = Counter()
        """Hashed pages per parent hash, whether or not the parent itself is here."""
        self._leaves: list[tuple[int, PageId]] = []
        """Heap of (last_used, page) of evictable leaves; entries may be stale."""
        self._counts = Counter({PageState.FREE: total})
        self._pins: Counter[BlockHash] = Counter()
        """Pins per block hash, whether or not the block is here."""
        self._unwritten_blocks = self._unwritten_depths = 0
        self._clock = 0

    # Queries

    def count(self, state: PageState) -> int:
        return self._counts[state]

    @property
    def available(self) -> int:
        """Pages that a claim can get: free ones and cached ones."""
        return self._counts[PageState.FREE] + self._counts[PageState.CACHED]

    @property
    def unheld(self) -> int:
        """Pages that nobody holds and nobody may still write to."""
        return self.available + self._counts[PageState.PINNED]

    @property
    def pinned_blocks(self) -> int:
        """Distinct blocks that pins keep, whether or not they are here."""
        return len(self._pins)

    @property
    def lacks_pinned(self) -> bool:
        """A pinned block, or a window part that goes with a pin, is not readable here. O(pinned blocks)."""
        lacks_part = self.windows is not None and self.windows.lacks_pinned
        return lacks_part or any(self.find(block_hash) is None for block_hash in self._pins)

    def pins_of_blocks(self) -> Counter[BlockHash]:
        """Return how many pins keep each block, as a copy."""
        return Counter(self._pins)

    def is_pinned(self, block_hash: BlockHash) -> bool:
        return block_hash in self._pins

    @property
    def unwritten(self) -> Unwritten:
        return Unwritten(self._unwritten_blocks, self._unwritten_depths)

    def is_filled(self, page: PageId) -> bool:
        return self._pages[page].filled

    def is_arriving(self, page: PageId) -> bool:
        return self._pages[page].state is PageState.ARRIVING

    def is_wanted(self, page: PageId) -> bool:
        return self._pages[page].refs > 0

    def is_shared(self, page: PageId) -> bool:
        return self._pages[page].refs > 1

    def writer(self, page: PageId) -> SessionId | None:
        return self._pages[page].writer

    def unwritten_blocks(self, pages: Sequence[PageId], blocks: Iterable[int]) -> list[int]:
        """Return those of a sequence's blocks that are arriving without a writer; `pages` is empty once it ended."""
        unwritten = []
        for block in blocks:
            record = self._pages[pages[block]] if block < len(pages) else None
            if record is not None and record.state is PageState.ARRIVING and record.writer is None:
                unwritten.append(block)
        return unwritten

    def is_coming(self, block_hash: BlockHash) -> bool:
        """Tell whether somebody writes the bytes of this block now."""
        page = self._by_hash.get(block_hash)
        return page is not None and self._pages[page].writer is not None

    def find(self, block_hash: BlockHash) -> PageId | None:
        """Return the filled page of this block, if any."""
        page = self._by_hash.get(block_hash)
        return page if page is not None and self._pages[page].filled else None

    def hits(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are filled here, with the window parts that the next token sees."""
        filled = len(hashes)
        for index, block_hash in enumerate(hashes):
            if self.find(block_hash) is None:
                filled = index
                break
        return filled if self.windows is None else self.windows.depth(hashes[:filled])

    def shortage(self, hashes: Sequence[BlockHash], private: int) -> int | None:
        """Return how many blocks `claim` would evict now, or None if there are too few pages for it. O(blocks)."""
        held = [self._by_hash.get(block_hash) for block_hash in hashes]
        taken = held.count(None) + private
        return max(0, taken - self._counts[PageState.FREE]) if taken <= self._takeable(held) else None

    def cached(self) -> list[CachedBlock]:
        """Return the cached and pinned blocks in no order. O(pages)."""
        return [
            CachedBlock(record.hash, record.parent, record.last_used)
            for record in self._pages
            if record.state in UNHELD_BLOCKS and record.hash is not None and record.parent is not None
        ]

    # Claiming and releasing

    def claim(self, hashes: Sequence[BlockHash], root: BlockHash, private: int, *, first: int = 0) -> Claim | None:
        """Hold a page for each block of a chain that goes on from `root`, plus `private` unhashed ones; all or nothing.

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
        pages: list[PageId] = []
        for index, page in enumerate(held):
            parent = hashes[index - 1] if index else root
            pages.append(page if page is not None else self._take_arriving(hashes[index], parent, first + index))
        pages.extend(self._take_private() for _ in range(private))
        return Claim(pages, missing, hits)

    def claim_private(self) -> PageId | None:
        """Return one more page for a growing sequence, or None if there is none."""
        return self._take_private() if self.available else None

    def share_filled(self, hashes: Sequence[BlockHash]) -> list[PageId | None]:
        """Hold the filled ones of these blocks; the caller releases them."""
        pages = [self.find(block_hash) for block_hash in hashes]
        for page in pages:
            if page is not None:
                self._acquire(page)
        return pages

    def release(self, pages: Iterable[PageId]) -> None:
        """Release one hold on each page, last first: a block's children become evictable before it."""
        for page in reversed(list(pages)):
            record = self._pages[page]
            assert record.refs > 0, f"page {page} is released more often than held"
            record.refs -= 1
            if record.refs == 0:
                self._retire(page)

    # Pinning

    def pin(self, hashes: Sequence[BlockHash]) -> None:
        """Keep these blocks from eviction, those that are here and those that will be; `unpin` takes the pin back.

        They are a whole prefix: of their window parts those are kept that go with its end.
        """
        if self.windows is not None:
            self.windows.pin(hashes)
        for block_hash in hashes:
            self._pins[block_hash] += 1
            page = self._by_hash.get(block_hash)
            if page is not None and self._pages[page].state is PageState.CACHED:
                self._move(page, PageState.PINNED)

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """Take one pin off each block; those without another are cached from now on."""
        if self.windows is not None:
            self.windows.unpin(hashes)
        self._unpin(hashes)

    def unpin_all(self) -> None:
        """Take every pin off every block."""
        if self.windows is not None:
            self.windows.unpin_all()
        self._unpin(list(self._pins.elements()))

    def _unpin(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            assert self._pins[block_hash] > 0, f"block {block_hash.hex()} is unpinned more often than pinned"
            self._pins[block_hash] -= 1
            if self._pins[block_hash]:
                continue
            del self._pins[block_hash]
            page = self._by_hash.get(block_hash)
            if page is not None and self._pages[page].state is PageState.PINNED:
                self._move(page, PageState.CACHED)
                self._offer(page)

    # Writing

    def assign_writer(self, page: PageId, session: SessionId) -> None:
        """Make `session` the only writer of the arriving page."""
        record = self._pages[page]
        assert record.state is PageState.ARRIVING, f"page {page} is {record.state.name}, not ARRIVING"
        assert record.writer is None, f"page {page} has a writer already"
        record.writer = session
        self._count_unwritten(record, -1)

    def clear_writer(self, page: PageId) -> None:
        """Remove the writer, which gave up or has been fenced; the next waiting sequence may become the writer."""
        record = self._pages[page]
        was_written, record.writer = record.writer is not None, None
        if record.state is PageState.QUARANTINED:
            self._forget(page)
        elif was_written and record.state is PageState.ARRIVING:
            self._count_unwritten(record, 1)

    def fill(self, page: PageId) -> None:
        """Mark the arriving page as filled: it holds its block's KV, verified or computed."""
        record = self._pages[page]
        assert record.state is PageState.ARRIVING, f"page {page} is {record.state.name}, not ARRIVING"
        assert record.hash is not None
        if record.writer is None:
            self._count_unwritten(record, -1)
        record.filled, record.writer = True, None
        self._move(page, PageState.ACTIVE)
        self._listener.stored(record.hash)

    def register_private(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Register a private page as a full block; it stays private if another page has that hash."""
        record = self._pages[page]
        assert record.state is PageState.ACTIVE, f"page {page} is {record.state.name}, not ACTIVE"
        assert record.hash is None, f"page {page} has a hash already"
        if block_hash in self._by_hash:
            return
        self._set_hash(page, block_hash, parent)
        record.filled = True
        self._listener.stored(block_hash)

    def forget_cached(self) -> int:
        """Forget every cached block; return how many there were."""
        cached = [PageId(page) for page in range(self.total) if self._pages[page].state is PageState.CACHED]
        for page in cached:
            self._forget_page(page)
        self._leaves.clear()
        if self.windows is not None:
            self.windows.forget_cached()
        return len(cached)

    def forget(self, pages: Sequence[PageId]) -> None:
        """Forget the cached and pinned blocks of a chain, last first, up to where another chain branches off."""
        for page in reversed(pages):
            record = self._pages[page]
            if record.state in UNHELD_BLOCKS and record.hash is not None and not self._children[record.hash]:
                self._forget_page(page)

    # Internals

    def _parent_of(self, block_hash: BlockHash) -> BlockHash | None:
        page = self.find(block_hash)
        return None if page is None else self._pages[page].parent

    def _takeable(self, held: Iterable[PageId | None]) -> int:
        """Return how many pages a claim can get besides those that hold its blocks already."""
        woken = sum(1 for page in held if page is not None and self._pages[page].state is PageState.CACHED)
        return self.available - woken

    def _acquire(self, page: PageId) -> None:
        record = self._pages[page]
        record.refs += 1
        if record.state in UNHELD_BLOCKS:
            self._move(page, PageState.ACTIVE)

    def _take(self) -> PageId:
        if not self._free:
            self._evict()
        page = self._free.popleft()
        self._pages[page].refs = 1
        self._listener.new_writer(page)
        return page

    def _take_private(self) -> PageId:
        page = self._take()
        self._move(page, PageState.ACTIVE)
        return page

    def _take_arriving(self, block_hash: BlockHash, parent: BlockHash, depth: int) -> PageId:
        page = self._take()
        self._set_hash(page, block_hash, parent)
        self._move(page, PageState.ARRIVING)
        self._pages[page].depth = depth
        self._count_unwritten(self._pages[page], 1)
        return page

    def _retire(self, page: PageId) -> None:
        """Move a page whose last hold was released."""
        record = self._pages[page]
        if record.filled:
            self._clock += 1
            record.last_used = self._clock
            is_pinned = record.hash in self._pins
            self._move(page, PageState.PINNED if is_pinned else PageState.CACHED)
            self._offer(page)
        elif record.writer is not None:
            self._drop_hash(page)
            self._move(page, PageState.QUARANTINED)
        else:
            if record.state is PageState.ARRIVING:
                self._count_unwritten(record, -1)
            self._forget(page)

    def _offer(self, page: PageId) -> None:
        record = self._pages[page]
        assert record.hash is not None
        if record.state is PageState.CACHED and not self._children[record.hash]:
            heapq.heappush(self._leaves, (record.last_used, page))
            if len(self._leaves) > 2 * self.total:
                self._leaves = [entry for entry in set(self._leaves) if self._is_fresh_leaf(*entry)]
                heapq.heapify(self._leaves)

    def _evict(self) -> None:
        """Free the least recently used leaf."""
        while self._leaves:
            last_used, page = heapq.heappop(self._leaves)
            if self._is_fresh_leaf(last_used, page):
                self._evict_page(page)
                return
        # No leaf left: every cached block has a child in use under a private copy of it. Any of them may go.
        cached = (page for page in range(self.total) if self._pages[page].state is PageState.CACHED)
        self._evict_page(PageId(min(cached, key=lambda page: self._pages[page].last_used)))

    def _is_fresh_leaf(self, last_used: int, page: PageId) -> bool:
        record = self._pages[page]
        if record.state is not PageState.CACHED or record.last_used != last_used:
            return False
        assert record.hash is not None
        return not self._children[record.hash]

    def _evict_page(self, page: PageId) -> None:
        record = self._pages[page]
        assert record.hash is not None
        assert record.parent is not None
        self._listener.evicting(page, record.hash, record.parent)
        self._remove_page(page, is_evicted=True)

    def _forget_page(self, page: PageId) -> None:
        self._listener.forgotten(self._remove_page(page, is_evicted=False))

    def _remove_page(self, page: PageId, *, is_evicted: bool) -> BlockHash:
        block_hash = self._pages[page].hash
        assert block_hash is not None
        if self.windows is not None:
            self.windows.page_removed(block_hash, is_evicted=is_evicted)
        self._forget(page)
        self._listener.removed(block_hash)
        return block_hash

    def _forget(self, page: PageId) -> None:
        record = self._pages[page]
        if record.hash is not None:
            self._drop_hash(page)
        record.filled, record.writer = False, None
        self._move(page, PageState.FREE)
        self._free.append(page)

    def _set_hash(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        record = self._pages[page]
        record.hash, record.parent = block_hash, parent
        self._by_hash[block_hash] = page
        self._children[parent] += 1

    def _drop_hash(self, page: PageId) -> None:
        record = self._pages[page]
        assert record.hash is not None
        assert record.parent is not None
        del self._by_hash[record.hash]
        parent, record.hash, record.parent = record.parent, None, None
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            above = self._by_hash.get(parent)
            if above is not None:
                self._offer(above)

    def _count_unwritten(self, record: _Page, change: int) -> None:
        self._unwritten_blocks += change
        self._unwritten_depths += change * record.depth

    def _move(self, page: PageId, state: PageState) -> None:
        record = self._pages[page]
        self._counts[record.state] -= 1
        self._counts[state] += 1
        record.state = state

    # Check

    def check_integrity(self) -> None:
        """Assert every invariant from first principles. O(pages); for tests and idle moments."""
        counted = Counter(record.state for record in self._pages)
        assert counted == +self._counts, f"counts {self._counts} but pages are {counted}"
        assert sum(self._counts.values()) == self.total
        assert sorted(self._free) == [i for i, r in enumerate(self._pages) if r.state is PageState.FREE]
        unwritten = [r.depth for r in self._pages if r.state is PageState.ARRIVING and r.writer is None]
        assert self.unwritten == Unwritten(len(unwritten), sum(unwritten)), f"{self.unwritten}, not {unwritten}"
        named = {record.hash: page for page, record in enumerate(self._pages) if record.hash is not None}
        assert named == self._by_hash, "hashes and pages disagree"
        assert len(named) == sum(record.hash is not None for record in self._pages), "two pages share a hash"
        assert self._children == Counter(record.parent for record in self._pages if record.parent is not None)
        assert all(count > 0 for count in self._pins.values()), f"pins that hold nothing: {self._pins}"
        leaves = set(self._leaves)
        for page, record in enumerate(self._pages):
            check_record(f"page {page}", record)
            if record.state in UNHELD_BLOCKS:
                assert (record.state is PageState.PINNED) == (record.hash in self._pins), f"{record} and its pins"
            if record.state is PageState.CACHED and record.hash is not None and not self._children[record.hash]:
                assert (record.last_used, page) in leaves, f"cached leaf {page} can never be evicted"
        if self.windows is not None:
            self.windows.check_integrity()
