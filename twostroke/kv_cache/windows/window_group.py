"""The window group: KV of blocks in layers with a window. That of one block is a *window part* and lies in a slot.

A token at position q of such a layer sees the positions q - W + 1 to q. So a sequence needs the window parts of only
its last blocks. For the layers without a window it needs the pages of all blocks. A window part has its own state
(`twostroke.kv_cache.groups.group_pool`), holders and writer. It never stays without the page of its block. A holder of
the part holds the page too. Where the page is removed, the part is removed first.

A part without holders is cached. The least recently used one is evicted, and the page of its block stays. Lower tiers
keep only parts with which a prompt or a sequence ended, or from which one continued. Sequences seldom continue from
other blocks.

Work that has begun never waits for a slot. Before it begins it commits the most slots that it will hold (`commit`). It
begins only if these, the slots committed to others, and the pinned and quarantined ones fit into the region together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.groups.group_pool import FurtherGroup, MakeGroup, PoolListener
from twostroke.kv_cache.groups.page_state import UNHELD_BLOCKS, PageRecord, PageState
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.shape import WindowShape, deepest


class WindowGroup(FurtherGroup):
    """All window parts of a worker, in slots of a region of their own."""

    def __init__(
        self,
        shape: WindowShape,
        pages: list[PageRecord],
        listener: PoolListener,
        parent_of: Callable[[BlockHash], BlockHash | None],
    ) -> None:
        """Adds the slots to `pages`, the records of all groups. `MakeGroup` explains `parent_of`."""
        assert shape.first == len(pages), "pages of whole blocks have the ids before the slots"
        super().__init__(pages, shape.slots, listener)
        self.shape = shape
        self._parent_of = parent_of
        self._cached: dict[PageId, None] = {}
        """Cached parts, the least recently used one first."""
        self.committed = 0
        """Sum of the slots that running work may hold at most."""

    # Queries

    def is_known(self, block_hash: BlockHash) -> bool:
        """Returns whether the part of this block is filled or arriving."""
        return block_hash in self._by_hash

    @property
    def tail_blocks(self) -> int:
        return self.shape.tail_blocks

    def depth(self, hashes: Sequence[BlockHash], most: int, has: Callable[[BlockHash], bool] | None = None) -> int:
        is_here = has or (lambda block_hash: self.find(block_hash) is not None)
        return deepest(most, self.shape.tail_blocks, lambda block: is_here(hashes[block]))

    # Committed slots

    def has_room(self, slots: int) -> bool:
        """Returns whether this many more slots can be committed, even if all running work holds what it committed."""
        kept = self._counts[PageState.PINNED] + self._counts[PageState.QUARANTINED]
        return self.committed + kept + slots <= self.shape.slots

    def commit(self, slots: int) -> None:
        """Commits this many slots to some work. A negative number gives them back."""
        self.committed += slots
        assert self.committed >= 0, "more slots are given back than were spoken for"

    # Holding and releasing

    def hold(self, block_hash: BlockHash) -> PageId:
        """Holds the part of a block, which is filled or arriving here."""
        slot = self._by_hash[block_hash]
        self._acquire(slot)
        return slot

    def take(self, block_hash: BlockHash) -> PageId | None:
        """Holds a block's part, which is arriving if it is not here; returns None if there is no slot.

        The caller holds the block's page.
        """
        slot = self._by_hash.get(block_hash)
        if slot is not None:
            self._acquire(slot)
            return slot
        slot = self._take()
        if slot is not None:
            self._pages[slot].hash = block_hash
            self._by_hash[block_hash] = slot
            self._move(slot, PageState.ARRIVING)
            self._count_unwritten(self._pages[slot], 1)
        return slot

    def take_private(self) -> PageId | None:
        """Holds a slot for a block without a hash, or returns None if there is none."""
        slot = self._take()
        if slot is not None:
            self._move(slot, PageState.ACTIVE)
        return slot

    def release(self, slots: Iterable[PageId], *, is_end: bool = True) -> None:
        """Releases one hold on each slot; the first is evicted first. `is_end`: see `PageRecord.is_end`."""
        for slot in slots:
            self._pages[slot].is_end |= is_end
            self._release(slot)

    def share_filled(self, hashes: Mapping[int, BlockHash]) -> dict[int, PageId]:
        """Holds the filled ones of these parts, as far as there is room for more. The caller holds their pages."""
        shared: dict[int, PageId] = {}
        for block, block_hash in hashes.items():
            if self.find(block_hash) is not None and self.has_room(1):
                shared[block] = self.hold(block_hash)
                self.commit(1)
        return shared

    def share(self, block_hash: BlockHash) -> PageId | None:
        slot = self.take(block_hash) if self.has_room(1) else None
        if slot is not None:
            self.commit(1)
        return slot

    def share_last(self, hashes: Sequence[BlockHash]) -> dict[int, PageId]:
        """Holds the parts of the last blocks of this chain, as far as there is room."""
        shared: dict[int, PageId] = {}
        for block in reversed(self.shape.tail(len(hashes))):
            slot = self.share(hashes[block])
            if slot is None:
                break
            shared[block] = slot
        return shared

    def unshare(self, slots: Collection[PageId]) -> None:
        self.release(slots)
        self.commit(-len(slots))

    # Pinning

    @property
    def most_pinned(self) -> int:
        return self.shape.most_pinned

    def has_room_to_pin(self, hashes: Sequence[BlockHash]) -> bool:
        new = sum(block_hash not in self._pins for block_hash in self.last_of(hashes))
        return len(self._pins) + new <= self.most_pinned

    def last_of(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Returns the blocks with window parts that a pin of this prefix keeps."""
        return hashes[self.shape.tail(len(hashes)).start :]

    # Writing

    def register_private(self, slot: PageId, block_hash: BlockHash) -> None:
        """Registers a private part of a full block; it stays private if another slot has that block."""
        record = self._pages[slot]
        assert record.state is PageState.ACTIVE, f"slot {slot} is {record.state.name}, not ACTIVE"
        assert record.hash is None, f"slot {slot} has a hash already"
        if block_hash in self._by_hash:
            return
        record.hash, record.filled = block_hash, True
        self._by_hash[block_hash] = slot
        self._listener.stored([block_hash])

    def page_removed(self, block_hash: BlockHash, *, is_evicted: bool) -> None:
        slot = self._by_hash.get(block_hash)
        if slot is not None:
            assert self._pages[slot].state in UNHELD_BLOCKS, f"slot {slot} is held without its page"
            self._remove(slot, is_evicted=is_evicted)

    def forget_cached(self) -> None:
        for slot in list(self._cached):
            self._remove(slot, is_evicted=False)

    # Internals

    def _take(self) -> PageId | None:
        if not self._free and not self._evict():
            return None
        return self._take_free(1)[0]

    def _evict(self) -> bool:
        """Frees the least recently used cached part, or a pinned one where pins came after work had begun."""
        slot = next(iter(self._cached), None)
        if slot is None:
            slot = next((each for each, record in self._records() if record.state is PageState.PINNED), None)
        if slot is not None:
            self._remove(slot, is_evicted=True)
        return slot is not None

    def _keep(self, slot: PageId) -> None:
        record = self._pages[slot]
        if record.hash is not None and self._parent_of(record.hash) is not None:
            self._move(slot, PageState.PINNED if record.hash in self._pins else PageState.CACHED)
            self._offer(slot)
        else:
            self._remove(slot, is_evicted=False)

    def _offer(self, slot: PageId) -> None:
        if self._pages[slot].state is PageState.CACHED:
            self._cached[slot] = None

    def _remove(self, slot: PageId, *, is_evicted: bool) -> None:
        record = self._pages[slot]
        block_hash, parent = record.hash, self._parent_of(record.hash) if record.hash is not None else None
        assert block_hash is not None
        if is_evicted and record.is_end and parent is not None:
            self._listener.evicting(slot, block_hash, parent)
        self._forget(slot)
        self._listener.removed([block_hash])

    def _drop_hash(self, slot: PageId) -> None:
        record = self._pages[slot]
        if record.hash is not None:
            del self._by_hash[record.hash]
            record.hash = None

    def _move(self, slot: PageId, state: PageState) -> None:
        if self._pages[slot].state is PageState.CACHED:
            del self._cached[slot]
        super()._move(slot, state)

    # Check

    def check_integrity(self) -> None:
        super().check_integrity()
        cached = {slot for slot, record in self._records() if record.state is PageState.CACHED}
        assert set(self._cached) == cached, "cached parts that can never be evicted"
        for slot, record in self._records():
            if record.state in UNHELD_BLOCKS:
                assert record.hash is not None
                assert self._parent_of(record.hash) is not None, f"window part {slot} without the page of its block"


def window_group(shape: WindowShape, listener: PoolListener) -> MakeGroup:
    """Returns a function that makes the window group of a pool."""
    return lambda pages, parent_of: WindowGroup(shape, pages, listener, parent_of)


def window_group_of(pool: BlockPool) -> WindowGroup | None:
    """Returns the window group of a pool, if it has one."""
    return next((group for group in pool.others if isinstance(group, WindowGroup)), None)
