"""Window parts: what the layers with a window keep of blocks, in slots of their own region of a worker's memory.

A token at position q of such a layer sees the positions q - W + 1 to q. So a sequence needs the window parts of its
last blocks alone, while it needs the pages of all of its blocks for the layers without a window. A window part has the
states of a page (`twostroke.kv_cache.pool`), and holders and a writer of its own. It never stays without the page of
its block: whoever holds the part holds the page too, and where the page is removed, the part is removed first.

A part that nobody holds is cached. The least recently used one is evicted, alone: the page of its block stays. Lower
tiers keep those with which a prompt or a sequence ended, or from which one went on: nobody else goes on from others.

Work that has begun never waits for a slot. Whoever begins says how many slots it will hold at most, and begins only
where these, what others said, and what is kept otherwise fit into the region together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.ids import BlockHash, PageId, SessionId
from twostroke.kv_cache.page_state import UNHELD_BLOCKS, PageState, check_record


class WindowListener(Protocol):
    """Called on every change in the set of readable window parts, and on every new writer of a slot."""

    def stored(self, block_hash: BlockHash) -> None: ...

    def removed(self, block_hash: BlockHash) -> None: ...

    def evicting(self, slot: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        """Called just before a part from which sequences may go on loses its slot: its bytes can still be copied."""

    def new_writer(self, page: PageId) -> None: ...


@dataclass(frozen=True, slots=True)
class WindowShape:
    """The slots of the window group, and how many blocks a token sees."""

    first: PageId
    """Id of the first slot: pages of whole blocks have the ids before it."""
    slots: int
    window: int
    """Tokens that a token sees, itself included."""
    block_size: int
    has_exact_blocks: bool = False
    """Tokens see their own block exact: where a sequence goes on behind a block, that whole block may run again."""

    @property
    def tail_blocks(self) -> int:
        """Blocks before a block boundary that the next token sees, or what runs again before it."""
        seen = self.window + (self.block_size - 1 if self.has_exact_blocks else 0)
        return -(-seen // self.block_size)

    @property
    def least_slots(self) -> int:
        """Slots that one sequence may need: a tail that it pulls, one to compute from, and what it computes."""
        return 2 * self.tail_blocks + 2

    @property
    def chunk_slots(self) -> int:
        """Slots for what one chunk computes, at most: of those that one sequence can do without, half."""
        return max(1, (self.slots - self.least_slots) // 2)

    @property
    def most_pinned(self) -> int:
        """Parts that pins may keep, so that a sequence always finds `least_slots`, and a chunk of `chunk_slots`."""
        return max(0, self.slots - self.least_slots - self.chunk_slots)

    def first_block(self, position: int) -> int:
        """Return the first block that the token at a position sees."""
        return max(0, position - self.window + 1) // self.block_size

    def tail(self, depth: int) -> range:
        """Return the blocks whose window parts are needed to go on after the first `depth` blocks."""
        return range(max(0, depth - self.tail_blocks), depth)


@dataclass(slots=True)
class _Slot:
    state: PageState = PageState.FREE
    hash: BlockHash | None = None
    filled: bool = False
    refs: int = 0
    writer: SessionId | None = None
    is_end: bool = False
    """A prompt or a sequence ended with it, or one went on from it."""


class WindowParts:
    """All window parts of a worker. One owner, one thread: the worker's event loop."""

    def __init__(
        self, shape: WindowShape, listener: WindowListener, parent_of: Callable[[BlockHash], BlockHash | None]
    ) -> None:
        """`parent_of` returns the parent of a block whose page is readable here, else None."""
        self.shape = shape
        self._listener = listener
        self._parent_of = parent_of
        ids = [PageId(shape.first + number) for number in range(shape.slots)]
        self._slots = {slot: _Slot() for slot in ids}
        self._free = deque(ids)
        self._by_hash: dict[BlockHash, PageId] = {}
        self._cached: dict[PageId, None] = {}
        """Cached parts, the least recently used one first."""
        self._counts = Counter({PageState.FREE: shape.slots})
        self._pins: Counter[BlockHash] = Counter()
        self.committed = 0
        """Slots that those who have begun may hold at most, in sum."""

    # Queries

    def count(self, state: PageState) -> int:
        return self._counts[state]

    @property
    def unheld(self) -> int:
        """Slots that nobody holds and nobody may still write to."""
        return sum(self._counts[state] for state in (PageState.FREE, PageState.CACHED, PageState.PINNED))

    def find(self, block_hash: BlockHash) -> PageId | None:
        """Return the filled part of this block, if any."""
        slot = self._by_hash.get(block_hash)
        return slot if slot is not None and self._slots[slot].filled else None

    def is_known(self, block_hash: BlockHash) -> bool:
        """Tell whether the part of this block is filled or arriving."""
        return block_hash in self._by_hash

    def is_filled(self, slot: PageId) -> bool:
        return self._slots[slot].filled

    def is_arriving(self, slot: PageId) -> bool:
        return self._slots[slot].state is PageState.ARRIVING

    def is_wanted(self, slot: PageId) -> bool:
        return self._slots[slot].refs > 0

    def writer(self, slot: PageId) -> SessionId | None:
        return self._slots[slot].writer

    def writer_of(self, block_hash: BlockHash) -> SessionId | None:
        """Return who writes the part of this block now."""
        slot = self._by_hash.get(block_hash)
        return None if slot is None else self._slots[slot].writer

    def depth(self, hashes: Sequence[BlockHash]) -> int:
        """Return after how many of these blocks, whose pages are all here, a sequence can go on. O(blocks)."""
        return deepest(len(hashes), self.shape.tail_blocks, lambda block: self.find(hashes[block]) is not None)

    def cached(self) -> list[BlockHash]:
        """Return the blocks of the cached and pinned parts, in no order. O(slots)."""
        return [slot.hash for slot in self._slots.values() if slot.state in UNHELD_BLOCKS and slot.hash is not None]

    # Slots that are spoken for

    def has_room(self, slots: int) -> bool:
        """Tell whether so many slots more can be held, whatever those do that have begun."""
        kept = self._counts[PageState.PINNED] + self._counts[PageState.QUARANTINED]
        return self.committed + kept + slots <= self.shape.slots

    def commit(self, slots: int) -> None:
        """Let somebody hold so many slots more at most; a negative number gives them back."""
        self.committed += slots
        assert self.committed >= 0, "more slots are given back than were spoken for"

    # Holding and releasing

    def hold(self, block_hash: BlockHash) -> PageId:
        """Hold the part of a block, which is filled or arriving here."""
        slot = self._by_hash[block_hash]
        self._acquire(slot)
        return slot

    def take(self, block_hash: BlockHash) -> PageId | None:
        """Hold the part of a block whose page the caller holds; it is arriving where it is not here.

        Returns None if there is no slot.
        """
        slot = self._by_hash.get(block_hash)
        if slot is not None:
            self._acquire(slot)
            return slot
        slot = self._take()
        if slot is not None:
            self._slots[slot].hash = block_hash
            self._by_hash[block_hash] = slot
            self._move(slot, PageState.ARRIVING)
        return slot

    def take_private(self) -> PageId | None:
        """Hold a slot for a block without a hash, or return None if there is none."""
        slot = self._take()
        if slot is not None:
            self._move(slot, PageState.ACTIVE)
        return slot

    def release(self, slots: Iterable[PageId], *, is_end: bool = True) -> None:
        """Release one hold on each; the first ones are evicted before the later ones.

        `is_end` is False for parts that a sequence only passed.
        """
        for slot in slots:
            record = self._slots[slot]
            assert record.refs > 0, f"slot {slot} is released more often than held"
            record.refs -= 1
            record.is_end |= is_end
            if record.refs == 0:
                self._retire(slot)

    def share_filled(self, hashes: Mapping[int, BlockHash]) -> dict[int, PageId]:
        """Hold the filled ones of these parts, whose pages the caller holds, as far as there is room for more holders.

        `unshare` releases them.
        """
        shared: dict[int, PageId] = {}
        for block, block_hash in hashes.items():
            if self.find(block_hash) is not None and self.has_room(1):
                shared[block] = self.hold(block_hash)
                self.commit(1)
        return shared

    def share_last(self, hashes: Sequence[BlockHash]) -> dict[int, PageId]:
        """Hold the parts that go with the end of this chain, whose pages the caller holds, as far as there is room.

        Those that are not here are arriving. `unshare` releases them.
        """
        shared: dict[int, PageId] = {}
        for block in reversed(self.shape.tail(len(hashes))):
            slot = self.take(hashes[block]) if self.has_room(1) else None
            if slot is None:
                break
            shared[block] = slot
            self.commit(1)
        return shared

    def unshare(self, slots: Collection[PageId]) -> None:
        self.release(slots)
        self.commit(-len(slots))

    # Pinning

    def has_room_to_pin(self, hashes: Sequence[BlockHash]) -> bool:
        """Tell whether a prefix can be pinned so that the longest sequence still fits."""
        new = sum(block_hash not in self._pins for block_hash in self.last_of(hashes))
        return len(self._pins) + new <= self.shape.most_pinned

    def last_of(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Return the blocks whose window parts a pin of this prefix keeps."""
        return hashes[self.shape.tail(len(hashes)).start :]

    def pins_of_blocks(self) -> Counter[BlockHash]:
        """Return how many pins keep the part of each block, as a copy."""
        return Counter(self._pins)

    def pin(self, hashes: Sequence[BlockHash]) -> None:
        """Keep the parts of the last blocks of a prefix, those that are here and those that will be."""
        for block_hash in self.last_of(hashes):
            self._pins[block_hash] += 1
            slot = self._by_hash.get(block_hash)
            if slot is not None and self._slots[slot].state is PageState.CACHED:
                self._move(slot, PageState.PINNED)

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """Take back one pin of a prefix."""
        for block_hash in self.last_of(hashes):
            self._unpin(block_hash)

    def unpin_all(self) -> None:
        for block_hash in list(self._pins.elements()):
            self._unpin(block_hash)

    @property
    def lacks_pinned(self) -> bool:
        return any(self.find(block_hash) is None for block_hash in self._pins)

    # Writing

    def assign_writer(self, slot: PageId, session: SessionId) -> None:
        """Make `session` the only writer of the arriving part."""
        record = self._slots[slot]
        assert record.state is PageState.ARRIVING, f"slot {slot} is {record.state.name}, not ARRIVING"
        assert record.writer is None, f"slot {slot} has a writer already"
        record.writer = session

    def clear_writer(self, slot: PageId) -> None:
        """Remove the writer, which gave up or has been fenced."""
        record = self._slots[slot]
        record.writer = None
        if record.state is PageState.QUARANTINED:
            self._free_slot(slot)

    def fill(self, slot: PageId) -> None:
        """Mark the arriving part as filled, verified or computed."""
        record = self._slots[slot]
        assert record.state is PageState.ARRIVING, f"slot {slot} is {record.state.name}, not ARRIVING"
        assert record.hash is not None
        record.filled, record.writer = True, None
        self._move(slot, PageState.ACTIVE)
        self._listener.stored(record.hash)

    def register_private(self, slot: PageId, block_hash: BlockHash) -> None:
        """Register a private part of a full block; it stays private if another slot has that block."""
        record = self._slots[slot]
        assert record.state is PageState.ACTIVE, f"slot {slot} is {record.state.name}, not ACTIVE"
        assert record.hash is None, f"slot {slot} has a hash already"
        if block_hash in self._by_hash:
            return
        record.hash, record.filled = block_hash, True
        self._by_hash[block_hash] = slot
        self._listener.stored(block_hash)

    def page_removed(self, block_hash: BlockHash, *, is_evicted: bool) -> None:
        """Remove the part of a block whose page is about to be evicted or forgotten: nobody holds either."""
        slot = self._by_hash.get(block_hash)
        if slot is not None:
            assert self._slots[slot].state in UNHELD_BLOCKS, f"slot {slot} is held without its page"
            self._remove(slot, is_evicted=is_evicted)

    def forget_cached(self) -> None:
        """Remove the cached parts whose pages stay."""
        for slot in list(self._cached):
            self._remove(slot, is_evicted=False)

    # Internals

    def _acquire(self, slot: PageId) -> None:
        record = self._slots[slot]
        record.refs += 1
        if record.state in UNHELD_BLOCKS:
            self._move(slot, PageState.ACTIVE)

    def _take(self) -> PageId | None:
        if not self._free and not self._evict():
            return None
        slot = self._free.popleft()
        self._slots[slot].refs = 1
        self._listener.new_writer(slot)
        return slot

    def _evict(self) -> bool:
        """Free the least recently used cached part; a pinned one only where pins were made after others began."""
        slot = next(iter(self._cached), None)
        if slot is None:
            slot = next((each for each, record in self._slots.items() if record.state is PageState.PINNED), None)
        if slot is not None:
            self._remove(slot, is_evicted=True)
        return slot is not None

    def _retire(self, slot: PageId) -> None:
        """Move a part whose last hold was released."""
        record = self._slots[slot]
        if record.filled and record.hash is not None and self._parent_of(record.hash) is not None:
            self._move(slot, PageState.PINNED if record.hash in self._pins else PageState.CACHED)
        elif record.filled:
            self._remove(slot, is_evicted=False)
        elif record.writer is not None:
            self._drop_hash(record)
            self._move(slot, PageState.QUARANTINED)
        else:
            self._free_slot(slot)

    def _unpin(self, block_hash: BlockHash) -> None:
        assert self._pins[block_hash] > 0, f"the part of {block_hash.hex()} is unpinned more often than pinned"
        self._pins[block_hash] -= 1
        if self._pins[block_hash]:
            return
        del self._pins[block_hash]
        slot = self._by_hash.get(block_hash)
        if slot is not None and self._slots[slot].state is PageState.PINNED:
            self._move(slot, PageState.CACHED)

    def _remove(self, slot: PageId, *, is_evicted: bool) -> None:
        record = self._slots[slot]
        block_hash, parent = record.hash, self._parent_of(record.hash) if record.hash is not None else None
        assert block_hash is not None
        if is_evicted and record.is_end and parent is not None:
            self._listener.evicting(slot, block_hash, parent)
        self._free_slot(slot)
        self._listener.removed(block_hash)

    def _free_slot(self, slot: PageId) -> None:
        record = self._slots[slot]
        self._drop_hash(record)
        record.filled, record.writer, record.is_end = False, None, False
        self._move(slot, PageState.FREE)
        self._free.append(slot)

    def _drop_hash(self, record: _Slot) -> None:
        if record.hash is not None:
            del self._by_hash[record.hash]
            record.hash = None

    def _move(self, slot: PageId, state: PageState) -> None:
        record = self._slots[slot]
        if record.state is PageState.CACHED:
            del self._cached[slot]
        if state is PageState.CACHED:
            self._cached[slot] = None
        self._counts[record.state] -= 1
        self._counts[state] += 1
        record.state = state

    # Check

    def check_integrity(self) -> None:
        """Assert every invariant from first principles. O(slots); for tests and idle moments."""
        records = self._slots
        counted = Counter(record.state for record in records.values())
        assert counted == +self._counts, f"counts {self._counts} but slots are {counted}"
        assert sorted(self._free) == [slot for slot, record in records.items() if record.state is PageState.FREE]
        assert set(self._cached) == {slot for slot, record in records.items() if record.state is PageState.CACHED}
        named = {record.hash: slot for slot, record in records.items() if record.hash is not None}
        assert named == self._by_hash, "hashes and slots disagree"
        assert len(named) == sum(record.hash is not None for record in records.values()), "two slots share a hash"
        assert all(count > 0 for count in self._pins.values()), f"pins that hold nothing: {self._pins}"
        for slot, record in records.items():
            check_record(f"window slot {slot}", record)
            if record.state in UNHELD_BLOCKS:
                assert record.hash is not None
                assert self._parent_of(record.hash) is not None, f"window part {slot} without the page of its block"
                assert (record.state is PageState.PINNED) == (record.hash in self._pins), f"{record} and its pins"


def deepest(blocks: int, tail_blocks: int, has_part: Callable[[int], bool]) -> int:
    """Return the largest depth, at most `blocks`, of which all of the last `tail_blocks` blocks have window parts.

    Depth 0 needs none, and a depth of less than `tail_blocks` needs all of its blocks.
    """
    depth, block = blocks, blocks - 1
    while block >= 0 and depth - block <= tail_blocks:
        if not has_part(block):
            depth = block
        block -= 1
    return depth
