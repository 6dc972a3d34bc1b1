"""The pages of one worker: who holds which block, who writes it, and what may be given away.

    FREE         nobody's
    CACHED       a named block that nobody uses now; the least recently used leaf goes first
    ARRIVING     a named block whose bytes are not there yet; requests with that prefix already share it
    ACTIVE       in use: filled and named, or private to the one sequence that is filling it
    QUARANTINED  wanted by nobody, but a transfer may still write to it

Always: free + cached + arriving + active + quarantined = total, and at most one page per name. A page that is
arriving has at most one writer (a pull or a computing sequence). When a writer gives up, the page stays with those
who wait for it, and the next one takes over.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.ids import BlockName, PageId, SessionId


class PageState(enum.Enum):
    FREE = "free"
    CACHED = "cached"
    ARRIVING = "arriving"
    ACTIVE = "active"
    QUARANTINED = "quarantined"


class PoolListener(Protocol):
    """Told of every change in the set of blocks that can be read, and of every new life of a page."""

    def stored(self, name: BlockName) -> None: ...

    def removed(self, name: BlockName) -> None: ...

    def new_writer(self, page: PageId) -> None: ...


@dataclass(frozen=True, slots=True)
class Claim:
    """Pages for a sequence, one per block: first the named blocks, then private room."""

    pages: list[PageId]
    missing: list[int]
    """Indices of named blocks that nobody had: arriving from now on, without a writer."""
    hits: int
    """Leading blocks that were filled already."""


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Blocks that are wanted and that nobody writes yet."""

    blocks: int
    depths: int
    """Sum of their indices in their chains."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block that nobody uses at the moment."""

    name: BlockName
    parent: BlockName
    last_used: int
    """Only grows."""


@dataclass(slots=True)
class _Page:
    state: PageState = PageState.FREE
    name: BlockName | None = None
    parent: BlockName | None = None
    filled: bool = False
    refs: int = 0
    writer: SessionId | None = None
    depth: int = 0
    """Index of the block in its chain."""
    last_used: int = 0
    """When its last hold was given back: what was used for long is not old."""


class BlockPool:
    """All pages of a worker. One owner, one thread: the worker's event loop."""

    def __init__(self, total: int, listener: PoolListener) -> None:
        self.total = total
        self._listener = listener
        self._pages = [_Page() for _ in range(total)]
        self._free: deque[PageId] = deque(PageId(page) for page in range(total))
        self._by_name: dict[BlockName, PageId] = {}
        self._children: Counter[BlockName] = Counter()
        """Named pages per parent name, whether or not the parent itself is here."""
        self._leaves: list[tuple[int, PageId]] = []
        """Heap of (last_used, page) of evictable leaves; entries may be stale."""
        self._counts = Counter({PageState.FREE: total})
        self._unwritten_blocks = self._unwritten_depths = 0
        self._clock = 0

    # Looking

    def count(self, state: PageState) -> int:
        return self._counts[state]

    @property
    def available(self) -> int:
        """Pages that a claim can get: free ones and cached ones."""
        return self._counts[PageState.FREE] + self._counts[PageState.CACHED]

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

    def find(self, name: BlockName) -> PageId | None:
        """The page that holds this block, filled."""
        page = self._by_name.get(name)
        return page if page is not None and self._pages[page].filled else None

    def hits(self, names: Sequence[BlockName]) -> int:
        """How many leading blocks are filled here."""
        for index, name in enumerate(names):
            if self.find(name) is None:
                return index
        return len(names)

    def cached(self) -> list[CachedBlock]:
        """In no order. O(pages)."""
        return [
            CachedBlock(record.name, record.parent, record.last_used)
            for record in self._pages
            if record.state is PageState.CACHED and record.name is not None and record.parent is not None
        ]

    # Claiming and releasing

    def claim(self, names: Sequence[BlockName], root: BlockName, private: int) -> Claim | None:
        """Hold a page for each block of a chain that starts at `root`, plus `private` unnamed ones; all or nothing.

        Blocks that are here, or arriving, are shared. None where the pool cannot give that many pages now.
        """
        held = [self._by_name.get(name) for name in names]
        missing = [index for index, page in enumerate(held) if page is None]
        woken = sum(1 for page in held if page is not None and self._pages[page].state is PageState.CACHED)
        if len(missing) + private > self.available - woken:
            return None
        hits = self.hits(names)
        for page in held:
            if page is not None:
                self._acquire(page)
        pages: list[PageId] = []
        for index, page in enumerate(held):
            parent = names[index - 1] if index else root
            pages.append(page if page is not None else self._take_arriving(names[index], parent, index))
        pages.extend(self._take_private() for _ in range(private))
        return Claim(pages, missing, hits)

    def claim_private(self) -> PageId | None:
        """One more page for a growing sequence, or None where none is to be had."""
        return self._take_private() if self.available else None

    def share_filled(self, names: Sequence[BlockName]) -> list[PageId | None]:
        """Hold those of the named blocks that are filled here; the caller releases the pages it got."""
        pages = [self.find(name) for name in names]
        for page in pages:
            if page is not None:
                self._acquire(page)
        return pages

    def release(self, pages: Iterable[PageId]) -> None:
        """Give back one hold on each page, tail first: a block's children become evictable before it does."""
        for page in reversed(list(pages)):
            record = self._pages[page]
            assert record.refs > 0, f"page {page} is released more often than held"
            record.refs -= 1
            if record.refs == 0:
                self._retire(page)

    # Writing

    def assign_writer(self, page: PageId, session: SessionId) -> None:
        """From now on only `session` may write the arriving page."""
        record = self._pages[page]
        assert record.state is PageState.ARRIVING, f"page {page} is {record.state.name}, not ARRIVING"
        assert record.writer is None, f"page {page} has a writer already"
        record.writer = session
        self._count_unwritten(record, -1)

    def clear_writer(self, page: PageId) -> None:
        """The writer can no longer touch the page (it gave up, or has been fenced): the next waiter may take over."""
        record = self._pages[page]
        was_written, record.writer = record.writer is not None, None
        if record.state is PageState.QUARANTINED:
            self._forget(page)
        elif was_written and record.state is PageState.ARRIVING:
            self._count_unwritten(record, 1)

    def fill(self, page: PageId) -> None:
        """The arriving page holds its block's KV, verified or computed."""
        record = self._pages[page]
        assert record.state is PageState.ARRIVING, f"page {page} is {record.state.name}, not ARRIVING"
        assert record.name is not None
        if record.writer is None:
            self._count_unwritten(record, -1)
        record.filled, record.writer = True, None
        self._move(page, PageState.ACTIVE)
        self._listener.stored(record.name)

    def name_private(self, page: PageId, name: BlockName, parent: BlockName) -> None:
        """A private page has become a full block. Where another page has that name already, this one stays private."""
        record = self._pages[page]
        assert record.state is PageState.ACTIVE, f"page {page} is {record.state.name}, not ACTIVE"
        assert record.name is None, f"page {page} has a name already"
        if name in self._by_name:
            return
        self._set_name(page, name, parent)
        record.filled = True
        self._listener.stored(name)

    def forget_cached(self) -> int:
        """Give up every block that nobody uses now; returns how many that were."""
        cached = [PageId(page) for page in range(self.total) if self._pages[page].state is PageState.CACHED]
        for page in cached:
            self._evict_page(page)
        self._leaves.clear()
        return len(cached)

    def forget(self, pages: Sequence[PageId]) -> None:
        """Give up those blocks of a chain that nobody uses now, last first, up to where another chain branches off."""
        for page in reversed(pages):
            record = self._pages[page]
            if record.state is PageState.CACHED and record.name is not None and not self._children[record.name]:
                self._evict_page(page)

    # Below: how pages change hands

    def _acquire(self, page: PageId) -> None:
        record = self._pages[page]
        record.refs += 1
        if record.state is PageState.CACHED:
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

    def _take_arriving(self, name: BlockName, parent: BlockName, depth: int) -> PageId:
        page = self._take()
        self._set_name(page, name, parent)
        self._move(page, PageState.ARRIVING)
        self._pages[page].depth = depth
        self._count_unwritten(self._pages[page], 1)
        return page

    def _retire(self, page: PageId) -> None:
        """The last hold is gone."""
        record = self._pages[page]
        if record.filled:
            self._clock += 1
            record.last_used = self._clock
            self._move(page, PageState.CACHED)
            self._offer(page)
        elif record.writer is not None:
            self._drop_name(page)
            self._move(page, PageState.QUARANTINED)
        else:
            if record.state is PageState.ARRIVING:
                self._count_unwritten(record, -1)
            self._forget(page)

    def _offer(self, page: PageId) -> None:
        record = self._pages[page]
        assert record.name is not None
        if record.state is PageState.CACHED and not self._children[record.name]:
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
        # No leaf left: every cached block has a child in use under a private twin of it. Any of them may go.
        cached = (page for page in range(self.total) if self._pages[page].state is PageState.CACHED)
        self._evict_page(PageId(min(cached, key=lambda page: self._pages[page].last_used)))

    def _is_fresh_leaf(self, last_used: int, page: PageId) -> bool:
        record = self._pages[page]
        if record.state is not PageState.CACHED or record.last_used != last_used:
            return False
        assert record.name is not None
        return not self._children[record.name]

    def _evict_page(self, page: PageId) -> None:
        name = self._pages[page].name
        assert name is not None
        self._forget(page)
        self._listener.removed(name)

    def _forget(self, page: PageId) -> None:
        record = self._pages[page]
        if record.name is not None:
            self._drop_name(page)
        record.filled, record.writer = False, None
        self._move(page, PageState.FREE)
        self._free.append(page)

    def _set_name(self, page: PageId, name: BlockName, parent: BlockName) -> None:
        record = self._pages[page]
        record.name, record.parent = name, parent
        self._by_name[name] = page
        self._children[parent] += 1

    def _drop_name(self, page: PageId) -> None:
        record = self._pages[page]
        assert record.name is not None
        assert record.parent is not None
        del self._by_name[record.name]
        parent, record.name, record.parent = record.parent, None, None
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            above = self._by_name.get(parent)
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

    # Proof

    def check_integrity(self) -> None:
        """Assert every invariant from first principles. O(pages); for tests and idle moments."""
        counted = Counter(record.state for record in self._pages)
        assert counted == +self._counts, f"counts {self._counts} but pages are {counted}"
        assert sum(self._counts.values()) == self.total
        assert sorted(self._free) == [i for i, r in enumerate(self._pages) if r.state is PageState.FREE]
        unwritten = [r.depth for r in self._pages if r.state is PageState.ARRIVING and r.writer is None]
        assert self.unwritten == Unwritten(len(unwritten), sum(unwritten)), f"{self.unwritten}, not {unwritten}"
        named = {record.name: page for page, record in enumerate(self._pages) if record.name is not None}
        assert named == self._by_name, "names and pages disagree"
        assert len(named) == sum(record.name is not None for record in self._pages), "two pages share a name"
        children = Counter(record.parent for record in self._pages if record.parent is not None)
        assert children == self._children
        for page, record in enumerate(self._pages):
            _check_page(page, record)
        leaves = set(self._leaves)
        for page, record in enumerate(self._pages):
            if record.state is PageState.CACHED and record.name is not None and not self._children[record.name]:
                assert (record.last_used, page) in leaves, f"cached leaf {page} can never be evicted"


def _check_page(page: int, record: _Page) -> None:
    match record.state:
        case PageState.FREE:
            consistent = not record.refs and record.name is None and not record.filled and record.writer is None
        case PageState.CACHED:
            consistent = not record.refs and record.name is not None and record.filled and record.writer is None
        case PageState.ARRIVING:
            consistent = record.refs > 0 and record.name is not None and not record.filled
        case PageState.ACTIVE:
            consistent = record.refs > 0 and record.writer is None and (record.name is None) == (not record.filled)
        case PageState.QUARANTINED:
            consistent = not record.refs and record.name is None and record.writer is not None
    assert consistent, f"page {page} is inconsistent: {record}"
