"""The host store keeps pages in host memory; the least recently used one that nobody reads or writes goes first.

One owner, one thread: the worker's event loop. It says where a page is to go; the caller copies the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.ids import BlockHash, PageId


@dataclass(slots=True)
class HostEntry:
    """A block in host memory."""

    block_hash: BlockHash
    parent: BlockHash
    page: PageId
    """Its page in the store's memory."""
    digest: bytes
    since_s: float
    holds: int = 0
    """Copies that are under way from it."""


class HostStore:
    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = [PageId(page) for page in reversed(range(pages))]
        self._entries: OrderedDict[BlockHash, HostEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._entries)

    def get(self, block_hash: BlockHash) -> HostEntry | None:
        return self._entries.get(block_hash)

    def touch(self, block_hash: BlockHash) -> None:
        """Note that a block was of use."""
        self._entries.move_to_end(block_hash)

    def victim(self) -> HostEntry | None:
        """Return the entry that has to go before another page fits; None if one fits, or if all are held."""
        if self._free:
            return None
        for _ in range(len(self._entries)):
            entry = next(iter(self._entries.values()))
            if not entry.holds:
                return entry
            self._entries.move_to_end(entry.block_hash)  # it is in use now
        return None

    def take(self) -> PageId | None:
        """Take a free page, to copy into and then `put`."""
        return self._free.pop() if self._free else None

    def put(self, entry: HostEntry) -> None:
        assert entry.block_hash not in self._entries, f"block {entry.block_hash.hex()} is in host memory already"
        self._entries[entry.block_hash] = entry

    def give_back(self, page: PageId) -> None:
        """Return a page that was taken and not put."""
        self._free.append(page)

    def remove(self, block_hash: BlockHash) -> HostEntry | None:
        """Remove a block; its page is free once no copy from it is under way."""
        entry = self._entries.pop(block_hash, None)
        if entry is not None and not entry.holds:
            self._free.append(entry.page)
        return entry

    def hold(self, entry: HostEntry) -> None:
        entry.holds += 1

    def release(self, entry: HostEntry) -> None:
        assert entry.holds > 0, f"page {entry.page} is released more often than held"
        entry.holds -= 1
        if not entry.holds and self._entries.get(entry.block_hash) is not entry:
            self._free.append(entry.page)

    def check_integrity(self) -> None:
        """Assert that every page is free, filled or held. O(pages); for tests."""
        pages = [entry.page for entry in self._entries.values()]
        assert len(set(pages)) == len(pages), "two blocks share a page"
        assert not set(pages) & set(self._free), "a page in use is free"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
