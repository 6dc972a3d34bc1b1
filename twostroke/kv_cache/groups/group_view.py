"""Queries about the pages of one page group, and waiting for them. `GroupPool` changes them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from twostroke.base.ids import BlockHash, PageId, SessionId
from twostroke.kv_cache.groups.page_state import UNHELD_BLOCKS, PageRecord, PageState, PageWaiter, check_record
from twostroke.kv_cache.parts import Part


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Arriving blocks without a writer."""

    blocks: int
    depths: int
    """Sum of the blocks' indices in their chains."""


class GroupView:
    """The pages of a group by their ids and their blocks."""

    def __init__(self, pages: list[PageRecord], total: int) -> None:
        """Adds `total` free pages to `pages`, the records of all groups of a worker by their ids."""
        self.total = total
        self._pages = pages
        self._own = range(len(pages), len(pages) + total)
        """Ids of the group's pages."""
        pages.extend(PageRecord() for _ in self._own)
        self._free = deque(map(PageId, self._own))
        self._by_hash: dict[BlockHash, PageId] = {}
        self._counts = Counter({PageState.FREE: total})
        self._pins: Counter[BlockHash] = Counter()
        """Pins per block hash, whether or not the block is here."""
        self._unwritten_blocks = self._unwritten_depths = 0
        self.changes = 0
        """How often a page was filled, or a writer of an arriving page came or went."""
        self._shared_written: Counter[SessionId] = Counter()
        """Number of pages with several holders that each writer writes."""

    # Queries

    def owns(self, page: PageId) -> bool:
        """Returns whether the page is one of this group."""
        return page in self._own

    def count(self, state: PageState) -> int:
        return self._counts[state]

    @property
    def unheld(self) -> int:
        """Pages without holders to which no transfer may still write."""
        return sum(self._counts[state] for state in (PageState.FREE, PageState.CACHED, PageState.PINNED))

    @property
    def unwritten(self) -> Unwritten:
        return Unwritten(self._unwritten_blocks, self._unwritten_depths)

    def is_filled(self, page: PageId) -> bool:
        return self._pages[page].filled

    def is_arriving(self, page: PageId) -> bool:
        return self._pages[page].state is PageState.ARRIVING

    def is_unwritten(self, page: PageId) -> bool:
        """Returns whether the page is arriving without a writer."""
        record = self._pages[page]
        return record.state is PageState.ARRIVING and record.writer is None

    def is_wanted(self, page: PageId) -> bool:
        return self._pages[page].refs > 0

    def writer(self, page: PageId) -> SessionId | None:
        return self._pages[page].writer

    def end_of_open(self, pages: Sequence[PageId], first: int, last: int, writer: SessionId) -> int:
        """Returns the index of the first page from `first` on that is filled or has another writer, at most `last`."""
        records = self._pages
        for index in range(first, last):
            record = records[pages[index]]
            if record.filled or (record.writer is not None and record.writer != writer):
                return index
        return max(first, last)

    def end_of_written(self, pages: Sequence[PageId], first: int, last: int, writer: SessionId) -> int:
        """Returns the index of the first page from `first` on that `writer` does not write, at most `last`."""
        records = self._pages
        for index in range(first, last):
            if records[pages[index]].writer != writer:
                return index
        return max(first, last)

    def writer_of(self, block_hash: BlockHash) -> SessionId | None:
        """Returns the session that writes the page of this block now, if any."""
        page = self._by_hash.get(block_hash)
        return None if page is None else self._pages[page].writer

    def find(self, block_hash: BlockHash) -> PageId | None:
        """Returns the filled page of this block, if any."""
        page = self._by_hash.get(block_hash)
        return page if page is not None and self._pages[page].filled else None

    def unheld_blocks(self) -> list[BlockHash]:
        """Returns the hashes of the cached and pinned blocks, in no order. O(pages)."""
        return [r.hash for _, r in self._records() if r.state in UNHELD_BLOCKS and r.hash is not None]

    def writes_shared(self, writer: SessionId) -> bool:
        """Returns whether `writer` writes a page that has several holders."""
        return writer in self._shared_written

    # Waiting

    def wait_for(self, page: PageId, waiter: PageWaiter, part: Part) -> None:
        """Notifies `waiter` of the next change of an arriving page, under the name `part`."""
        record = self._pages[page]
        assert record.state is PageState.ARRIVING, f"page {page} is {record.state.name}, not ARRIVING"
        if record.waiters is None:
            record.waiters = {waiter: part}
        else:
            record.waiters[waiter] = part

    def filled_or_awaited(
        self, pages: Mapping[Part, PageId], waiter: PageWaiter
    ) -> tuple[dict[Part, PageId], list[Part]]:
        """Returns the filled pages and the arriving parts. `waiter` is notified of the next change of the latter."""
        records, filled, awaited = self._pages, dict[Part, PageId](), list[Part]()
        for part, page in pages.items():
            record = records[page]
            if record.filled:
                filled[part] = page
            elif record.state is PageState.ARRIVING:
                awaited.append(part)
                if record.waiters is None:
                    record.waiters = {waiter: part}
                else:
                    record.waiters[waiter] = part
        return filled, awaited

    def stop_waiting(self, page: PageId, waiter: PageWaiter) -> None:
        """Stops notifying `waiter` of changes of the page."""
        record = self._pages[page]
        if record.waiters is not None:
            record.waiters.pop(waiter, None)
            record.waiters = record.waiters or None

    # Pins

    def is_pinned(self, block_hash: BlockHash) -> bool:
        return block_hash in self._pins

    @property
    def most_pinned(self) -> int:
        """Most pages that pins may keep."""
        return self.total

    def pins_of_blocks(self) -> Counter[BlockHash]:
        """Returns how many pins keep each block, as a copy."""
        return Counter(self._pins)

    @property
    def lacks_pinned(self) -> bool:
        """Whether a pinned block is not readable here. O(pinned blocks)."""
        return any(self.find(block_hash) is None for block_hash in self._pins)

    def last_of(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Returns the blocks of a prefix that a pin of it keeps in this group."""
        return hashes

    def _records(self) -> Iterator[tuple[PageId, PageRecord]]:
        return ((PageId(page), self._pages[page]) for page in self._own)

    # Check

    def check_integrity(self) -> None:
        """Asserts every invariant from first principles. O(pages); for tests and idle moments."""
        records = dict(self._records())
        counted = Counter(record.state for record in records.values())
        assert counted == +self._counts, f"counts {self._counts} but pages are {counted}"
        assert sum(self._counts.values()) == self.total
        assert sorted(self._free) == [page for page, record in records.items() if record.state is PageState.FREE]
        unwritten = [r.depth for r in records.values() if r.state is PageState.ARRIVING and r.writer is None]
        assert self.unwritten == Unwritten(len(unwritten), sum(unwritten)), f"{self.unwritten}, not {unwritten}"
        shared = [r.writer for r in records.values() if r.writer is not None and r.refs > 1]
        assert self._shared_written == Counter(shared), f"{self._shared_written} pages are shared, not {shared}"
        named = {record.hash: page for page, record in records.items() if record.hash is not None}
        assert named == self._by_hash, "hashes and pages disagree"
        assert len(named) == sum(record.hash is not None for record in records.values()), "two pages share a hash"
        assert all(count > 0 for count in self._pins.values()), f"pins that hold nothing: {self._pins}"
        for page, record in records.items():
            check_record(f"page {page}", record)
            if record.state in UNHELD_BLOCKS:
                assert (record.state is PageState.PINNED) == (record.hash in self._pins), f"{record} and its pins"
