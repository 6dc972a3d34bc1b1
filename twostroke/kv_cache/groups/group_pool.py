"""The pages of one page group of a worker: their blocks, holders, writers and pins.

    FREE         unused
    CACHED       a hashed block without holders, which may be evicted
    PINNED       a hashed block without holders that a pin keeps
    ARRIVING     a hashed block whose bytes are not there yet; requests with that prefix already share it
    ACTIVE       in use: filled and hashed, or private to the one sequence that is filling it
    QUARANTINED  without holders, but a transfer may still write to it

Always: free + cached + pinned + arriving + active + quarantined = total, and at most one page per block hash. An
arriving page has at most one writer (a pull or a computing sequence). When it gives up, the next sequence that waits
for the page may become its writer.

A pin marks a block hash, whether or not the block is here: a pinned block that is in use is ACTIVE or ARRIVING like any
other, and becomes PINNED where it would become CACHED.

What a group keeps and in which order it evicts is up to its kind: `FullGroup` keeps whole chains, a `FurtherGroup` some
blocks of them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from twostroke.base.ids import BlockHash, PageId, SessionId
from twostroke.kv_cache.groups.group_view import GroupView
from twostroke.kv_cache.groups.page_state import UNHELD_BLOCKS, PageRecord, PageState, PageWaiter
from twostroke.kv_cache.parts import Part


class PoolListener(Protocol):
    """Called on every change in the set of readable blocks, and on every new writer of a page."""

    def stored(self, block_hashes: Sequence[BlockHash]) -> None: ...

    def removed(self, block_hashes: Sequence[BlockHash]) -> None: ...

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Called just before a cached block loses its page to another block: its bytes can still be copied."""

    def forgotten(self, block_hash: BlockHash) -> None:
        """Called with a removed block of which no copy may be used again, wherever it lies."""

    def new_writers(self, pages: Sequence[PageId]) -> None: ...


class GroupPool(GroupView, abc.ABC):
    """All pages of a group. One owner, one thread: the worker's event loop."""

    def __init__(self, pages: list[PageRecord], total: int, listener: PoolListener) -> None:
        """Adds `total` free pages to `pages`, the records of all groups of a worker by their ids."""
        super().__init__(pages, total)
        self._listener = listener

    # Holding for others

    @abc.abstractmethod
    def share_filled(self, hashes: Mapping[int, BlockHash]) -> dict[int, PageId]:
        """Holds the filled pages of these blocks, and returns them by the keys of `hashes`. `unshare` releases them."""

    @abc.abstractmethod
    def unshare(self, pages: Collection[PageId]) -> None:
        """Releases pages that were shared, those of earlier blocks first."""

    # Writing

    def assign_writer(self, page: PageId, session: SessionId) -> None:
        """Makes `session` the only writer of the arriving page."""
        record = self._pages[page]
        assert record.state is PageState.ARRIVING, f"page {page} is {record.state.name}, not ARRIVING"
        assert record.writer is None, f"page {page} has a writer already"
        record.writer = session
        self.changes += 1
        self._count_unwritten(record, -1)
        if record.refs > 1:
            self._count_shared(session, 1)

    def assign_unwritten(self, pages: Iterable[PageId], session: SessionId) -> None:
        """Makes `session` the only writer of those of these pages that are arriving without one."""
        records, assigned, depths = self._pages, 0, 0
        for page in pages:
            record = records[page]
            if record.state is PageState.ARRIVING and record.writer is None:
                record.writer = session
                assigned += 1
                depths += record.depth
                if record.refs > 1:
                    self._count_shared(session, 1)
        self.changes += assigned
        self._unwritten_blocks -= assigned
        self._unwritten_depths -= depths

    def clear_writer(self, page: PageId) -> None:
        """Removes the writer, which gave up or has been fenced; the next waiting sequence may become the writer."""
        record = self._pages[page]
        writer, record.writer = record.writer, None
        if record.state is PageState.QUARANTINED:
            self._forget(page)
        elif writer is not None and record.state is PageState.ARRIVING:
            self.changes += 1
            self._count_unwritten(record, 1)
            if record.refs > 1:
                self._count_shared(writer, -1)
            if record.waiters is not None:
                _notify_waiters([record])

    def fill(self, page: PageId) -> None:
        """Marks the arriving page as filled: it holds its block's KV, verified or computed."""
        self.fill_all([page])

    def fill_all(self, pages: Sequence[PageId]) -> None:
        """Marks arriving pages as filled, and notifies the listener and each waiter once for all of them."""
        records, stored, awaited = self._pages, list[BlockHash](), list[PageRecord]()
        for page in pages:
            record = records[page]
            assert record.state is PageState.ARRIVING, f"page {page} is {record.state.name}, not ARRIVING"
            assert record.hash is not None
            if record.writer is None:
                self._count_unwritten(record, -1)
            elif record.refs > 1:
                self._count_shared(record.writer, -1)
            record.filled, record.writer, record.state = True, None, PageState.ACTIVE
            stored.append(record.hash)
            if record.waiters is not None:
                awaited.append(record)
        self._counts[PageState.ARRIVING] -= len(stored)
        self._counts[PageState.ACTIVE] += len(stored)
        self.changes += len(stored)
        self._listener.stored(stored)
        if awaited:
            _notify_waiters(awaited)

    # Pinning

    def pin_blocks(self, hashes: Iterable[BlockHash]) -> None:
        """Keeps these blocks from eviction, those that are here and those that will be."""
        for block_hash in hashes:
            self._pins[block_hash] += 1
            page = self._by_hash.get(block_hash)
            if page is not None and self._pages[page].state is PageState.CACHED:
                self._move(page, PageState.PINNED)

    def unpin_blocks(self, hashes: Iterable[BlockHash]) -> None:
        """Removes one pin from each block. A block without holders and further pins is cached from now on."""
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

    # Internals

    def _acquire(self, page: PageId) -> None:
        record = self._pages[page]
        record.refs += 1
        if record.state in UNHELD_BLOCKS:
            self._move(page, PageState.ACTIVE)
        elif record.refs == 2 and record.writer is not None:
            self._count_shared(record.writer, 1)

    def _release(self, page: PageId) -> None:
        """Releases one hold on a page."""
        record = self._pages[page]
        assert record.refs > 0, f"page {page} is released more often than held"
        record.refs -= 1
        if record.refs == 0:
            self._retire(page)
        elif record.refs == 1 and record.writer is not None:
            self._count_shared(record.writer, -1)

    def _take_free(self, count: int) -> list[PageId]:
        """Takes `count` free pages, each with one holder. The caller moves them to their next state."""
        taken = [self._free.popleft() for _ in range(count)]
        for page in taken:
            self._pages[page].refs = 1
        self._listener.new_writers(taken)
        return taken

    @abc.abstractmethod
    def _offer(self, page: PageId) -> None:
        """Notes that a page may be evicted from now on."""

    def _retire(self, page: PageId) -> None:
        """Moves a page after its last hold was released."""
        record = self._pages[page]
        record.waiters = None
        if record.filled:
            self._keep(page)
        elif record.writer is not None:
            self._drop_hash(page)
            self._move(page, PageState.QUARANTINED)
        else:
            if record.state is PageState.ARRIVING:
                self._count_unwritten(record, -1)
            self._forget(page)

    @abc.abstractmethod
    def _keep(self, page: PageId) -> None:
        """Keeps a filled page without holders, or removes it where the group keeps none of its kind."""

    def _forget(self, page: PageId) -> None:
        record = self._pages[page]
        self._drop_hash(page)
        record.filled, record.writer, record.is_end = False, None, False
        self._move(page, PageState.FREE)
        self._free.append(page)

    @abc.abstractmethod
    def _drop_hash(self, page: PageId) -> None:
        """Removes the block hash from a page."""

    def _count_unwritten(self, record: PageRecord, change: int) -> None:
        self._unwritten_blocks += change
        self._unwritten_depths += change * record.depth

    def _count_shared(self, writer: SessionId, change: int) -> None:
        self._shared_written[writer] += change
        if not self._shared_written[writer]:
            del self._shared_written[writer]

    def _move(self, page: PageId, state: PageState) -> None:
        record = self._pages[page]
        self._counts[record.state] -= 1
        self._counts[state] += 1
        record.state = state


def _notify_waiters(records: Iterable[PageRecord]) -> None:
    """Notifies the waiters of these pages, each of them once."""
    changed: dict[PageWaiter, list[Part]] = {}
    for record in records:
        waiters, record.waiters = record.waiters, None
        for waiter, part in (waiters or {}).items():
            changed.setdefault(waiter, []).append(part)
    for waiter, parts in changed.items():
        waiter.pages_changed(parts)


class FurtherGroup(GroupPool):
    """A group beside the first one: it keeps the pages of some blocks of a chain, not of all.

    A holder of its page of a block holds the block's page in the first group, too. Where the first group removes the
    page of a block, the others have removed theirs before.
    """

    @property
    @abc.abstractmethod
    def tail_blocks(self) -> int:
        """Number of blocks at the end of a prefix whose pages of this group a sequence needs to continue after it."""

    @abc.abstractmethod
    def depth(self, hashes: Sequence[BlockHash], most: int, has: Callable[[BlockHash], bool] | None = None) -> int:
        """Returns after how many of these blocks a sequence can continue. The first group has the pages of `most` of
        them. O(blocks).

        `has` returns whether this group's page of a block is available. None: if it is filled here.
        """

    @abc.abstractmethod
    def share(self, block_hash: BlockHash) -> PageId | None:
        """Holds this group's page of a block, or returns None if there is no room. The caller holds the first group's.

        A page that is not here is arriving. `unshare` releases the page.
        """

    @abc.abstractmethod
    def share_last(self, hashes: Sequence[BlockHash]) -> dict[int, PageId]:
        """Holds the pages of this group that a sequence needs to continue after this chain, as far as there is room.

        The caller holds the first group's pages of the chain. Pages that are not here are arriving. `unshare` releases
        them.
        """

    @abc.abstractmethod
    def has_room_to_pin(self, hashes: Sequence[BlockHash]) -> bool:
        """Returns whether a prefix can be pinned such that the longest sequence still fits."""

    @abc.abstractmethod
    def page_removed(self, block_hash: BlockHash, *, is_evicted: bool) -> None:
        """Removes the page of a block before the first group evicts or forgets its own. Neither has holders."""

    @abc.abstractmethod
    def forget_cached(self) -> None:
        """Removes the cached pages. Those of the first group stay."""


MakeGroup = Callable[[list[PageRecord], Callable[[BlockHash], BlockHash | None]], FurtherGroup]
"""Makes a group over the records of all groups.

Its second argument returns the parent of a block with a readable page in the first group, else None."""
