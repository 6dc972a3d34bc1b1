"""The host store keeps pages in host memory. It evicts the least recently used one that is not being read or written.

One owner, one thread: the worker's event loop. It assigns the pages; the caller copies the bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.base.ids import BlockHash, PageId


@dataclass(slots=True)
class HostEntry:
    """A block in host memory."""

    block_hash: BlockHash
    parent: BlockHash
    page: PageId
    """The block's page in the store's memory."""
    digest: bytes
    since_s: float
    holds: int = 0
    """Number of copies from it that are under way."""
    last_used: int = 0
    """Logical time of its last use."""


class HostStore:
    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = [PageId(page) for page in reversed(range(pages))]
        self._entries: dict[BlockHash, HostEntry] = {}
        self._unheld: list[tuple[int, BlockHash]] = []
        """Heap of (last_used, block) of entries without holders; some may be stale."""
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._entries)

    def get(self, block_hash: BlockHash) -> HostEntry | None:
        return self._entries.get(block_hash)

    def touch(self, block_hash: BlockHash) -> None:
        """Makes a block the most recently used one."""
        self._use(self._entries[block_hash])

    def victim(self) -> HostEntry | None:
        """Returns the entry to remove before another page fits; None if a page is free, or if all entries are held.

        Held entries do not make it slower: each is removed from the heap once.
        """
        if self._free:
            return None
        while self._unheld:
            last_used, block_hash = self._unheld[0]
            entry = self._entries.get(block_hash)
            if entry is not None and not entry.holds and entry.last_used == last_used:
                return entry
            heapq.heappop(self._unheld)
        return None

    def take(self) -> PageId | None:
        """Takes a free page, to copy into and then `put`."""
        return self._free.pop() if self._free else None

    def put(self, entry: HostEntry) -> None:
        assert entry.block_hash not in self._entries, f"block {entry.block_hash.hex()} is in host memory already"
        self._entries[entry.block_hash] = entry
        self._use(entry)

    def give_back(self, page: PageId) -> None:
        """Returns a page that was taken and not put."""
        self._free.append(page)

    def remove(self, block_hash: BlockHash) -> HostEntry | None:
        """Removes a block; its page is free once no copy from it is under way."""
        entry = self._entries.pop(block_hash, None)
        if entry is not None and not entry.holds:
            self._free.append(entry.page)
        return entry

    def hold(self, entry: HostEntry) -> None:
        entry.holds += 1

    def release(self, entry: HostEntry) -> None:
        assert entry.holds > 0, f"page {entry.page} is released more often than held"
        entry.holds -= 1
        if entry.holds:
            return
        if self._entries.get(entry.block_hash) is entry:
            self._offer(entry)
        else:
            self._free.append(entry.page)

    def _use(self, entry: HostEntry) -> None:
        self._clock += 1
        entry.last_used = self._clock
        if not entry.holds:
            self._offer(entry)

    def _offer(self, entry: HostEntry) -> None:
        heapq.heappush(self._unheld, (entry.last_used, entry.block_hash))
        if len(self._unheld) > 2 * self.pages:
            self._unheld = [(each.last_used, each.block_hash) for each in self._entries.values() if not each.holds]
            heapq.heapify(self._unheld)

    def check_integrity(self) -> None:
        """Asserts that every page is free, filled or held. O(pages); for tests."""
        pages = [entry.page for entry in self._entries.values()]
        assert len(set(pages)) == len(pages), "two blocks share a page"
        assert not set(pages) & set(self._free), "a page in use is free"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        unheld = {(each.last_used, each.block_hash) for each in self._entries.values() if not each.holds}
        assert unheld <= set(self._unheld), "an entry that nobody holds can never go"
