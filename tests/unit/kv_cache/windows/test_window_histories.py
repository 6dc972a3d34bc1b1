"""Random histories of window parts beside the pages of their blocks, against a slow and obviously right oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twostroke.base.ids import BlockHash, PageId, SessionId
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.shape import WindowShape
from twostroke.kv_cache.windows.window_group import window_group, window_group_of

PAGES, SLOTS, TAIL = 9, 6, 2
chains = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(lambda tokens: block_hashes_of(tokens, 1))
picks = st.integers(0, 10**6)


@dataclass
class Part:
    """What a slot that is not free must be."""

    hash: BlockHash | None
    filled: bool = False
    holders: int = 1
    writer: SessionId | None = None
    released_at: int = 0

    def state(self, pinned: Counter[BlockHash]) -> PageState:
        if self.holders:
            return PageState.ARRIVING if self.hash is not None and not self.filled else PageState.ACTIVE
        if not self.filled:
            return PageState.QUARANTINED
        return PageState.PINNED if self.hash in pinned else PageState.CACHED


@dataclass
class Holder:
    """Somebody who holds the pages of a chain and the window parts of some of its blocks."""

    hashes: list[BlockHash]
    pages: list[PageId]
    parts: dict[int, PageId]
    """Slots by the index of the block."""
    private: list[PageId]


class Readable:
    """Follows what is told of readable blocks."""

    def __init__(self) -> None:
        self.blocks: set[BlockHash] = set()
        self.written: list[PageId] = []

    def stored(self, block_hashes: Sequence[BlockHash]) -> None:
        assert not self.blocks.intersection(block_hashes)
        self.blocks.update(block_hashes)

    def removed(self, block_hashes: Sequence[BlockHash]) -> None:
        assert self.blocks.issuperset(block_hashes)
        self.blocks.difference_update(block_hashes)

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None: ...

    def forgotten(self, block_hash: BlockHash) -> None: ...

    def new_writers(self, pages: Sequence[PageId]) -> None:
        self.written += pages


class WindowHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.listener, self.told = Readable(), Readable()
        self.pool = BlockPool(PAGES, self.listener, window_group(WindowShape(PageId(PAGES), SLOTS, TAIL, 1), self.told))
        windows = window_group_of(self.pool)
        assert windows is not None
        self.windows = windows
        self.truth: dict[PageId, Part] = {}
        self.holders: list[Holder] = []
        self.pins: list[list[BlockHash]] = []
        self.clock = self.sessions = 0

    # The oracle's own words

    def pinned(self) -> Counter[BlockHash]:
        return Counter(block_hash for hashes in self.pins for block_hash in hashes[-TAIL:])

    def slot_of(self, block_hash: BlockHash) -> PageId | None:
        return next((slot for slot, part in self.truth.items() if part.hash == block_hash), None)

    def in_state(self, state: PageState) -> list[PageId]:
        pinned = self.pinned()
        return sorted(slot for slot, part in self.truth.items() if part.state(pinned) is state)

    def readable(self) -> set[BlockHash]:
        return {part.hash for part in self.truth.values() if part.filled and part.hash is not None}

    def forget_parts_without_pages(self) -> None:
        """Parts go with the pages of their blocks, which the pool has evicted."""
        for slot, part in list(self.truth.items()):
            if not part.holders and part.filled and part.hash is not None and self.pool.find(part.hash) is None:
                del self.truth[slot]

    def expect_taken(self, slot: PageId | None) -> bool:
        """Tells whether there was a slot; what had to go for it is what the oracle would have evicted."""
        if len(self.truth) == SLOTS:
            unheld = self.in_state(PageState.CACHED) or self.in_state(PageState.PINNED)
            if not unheld:
                assert slot is None
                return False
            oldest = min(unheld, key=lambda each: self.truth[each].released_at)
            if self.truth[oldest].state(self.pinned()) is PageState.CACHED:
                assert slot == oldest
            assert slot in unheld
            del self.truth[slot]
        assert slot is not None
        assert slot not in self.truth
        assert self.told.written.pop() == slot
        return True

    def let_go(self, slot: PageId) -> None:
        part = self.truth[slot]
        part.holders -= 1
        if part.holders:
            return
        self.clock += 1
        part.released_at = self.clock
        if part.filled and part.hash is not None and self.pool.find(part.hash) is not None:
            return
        part.hash, part.filled = None, False
        if part.writer is None:
            del self.truth[slot]

    # What happens

    @rule(hashes=chains)
    def begin(self, hashes: list[BlockHash]) -> None:
        claim = self.pool.claim(hashes, root_hash(), 0)
        self.forget_parts_without_pages()
        if claim is not None:
            self.holders.append(Holder(hashes, claim.pages, {}, []))

    @precondition(lambda self: self.holders)
    @rule(pick=picks)
    def fill_a_page(self, pick: int) -> None:
        holder = self.holders[pick % len(self.holders)]
        page = next((page for page in holder.pages if not self.pool.is_filled(page)), None)
        if page is not None:
            self.pool.fill(page)

    @precondition(lambda self: self.holders)
    @rule(pick=picks, block=picks)
    def take(self, pick: int, block: int) -> None:
        holder = self.holders[pick % len(self.holders)]
        block %= len(holder.hashes)
        if block in holder.parts:
            return
        here = self.slot_of(holder.hashes[block])
        slot = self.windows.take(holder.hashes[block])
        if here is not None:
            assert slot == here
            self.truth[here].holders += 1
        elif not self.expect_taken(slot):
            return
        else:
            assert slot is not None
            self.truth[slot] = Part(holder.hashes[block])
        assert slot is not None
        holder.parts[block] = slot

    @precondition(lambda self: self.holders)
    @rule(pick=picks)
    def take_private(self, pick: int) -> None:
        slot = self.windows.take_private()
        if self.expect_taken(slot):
            assert slot is not None
            self.truth[slot] = Part(None)
            self.holders[pick % len(self.holders)].private.append(slot)

    @precondition(lambda self: any(holder.private for holder in self.holders))
    @rule(pick=picks, block=picks)
    def register(self, pick: int, block: int) -> None:
        """A block that its holder has computed: its page is here, and it is the holder's."""
        holder = next(holder for holder in self.holders if holder.private)
        block %= len(holder.hashes)
        if block in holder.parts or self.pool.find(holder.hashes[block]) != holder.pages[block]:
            return
        slot, is_twin = holder.private[-1], self.slot_of(holder.hashes[block]) is not None
        self.windows.register_private(slot, holder.hashes[block])
        if not is_twin:
            holder.parts[block] = holder.private.pop()
            self.truth[slot].hash, self.truth[slot].filled = holder.hashes[block], True

    @precondition(lambda self: any(holder.parts for holder in self.holders))
    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        """A sequence has passed a block: it holds its page, and its window part no longer."""
        holders = [holder for holder in self.holders if holder.parts]
        holder = holders[pick % len(holders)]
        slot = holder.parts.pop(min(holder.parts))
        self.windows.release([slot])
        self.let_go(slot)

    @precondition(lambda self: self.holders)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        holder = self.holders.pop(pick % len(self.holders))
        slots = [*holder.parts.values(), *holder.private]
        self.windows.release(slots)
        for slot in slots:
            self.let_go(slot)
        self.pool.release(holder.pages)

    @precondition(lambda self: self.in_state(PageState.ARRIVING))
    @rule(pick=picks)
    def begin_writing(self, pick: int) -> None:
        slots = [slot for slot in self.in_state(PageState.ARRIVING) if self.truth[slot].writer is None]
        if slots:
            slot = slots[pick % len(slots)]
            self.sessions += 1
            self.windows.assign_writer(slot, SessionId(self.sessions))
            self.truth[slot].writer = SessionId(self.sessions)

    @precondition(lambda self: any(part.writer for part in self.truth.values()))
    @rule(pick=picks)
    def give_up_writing(self, pick: int) -> None:
        slots = sorted(slot for slot, part in self.truth.items() if part.writer)
        slot = slots[pick % len(slots)]
        self.windows.clear_writer(slot)
        self.truth[slot].writer = None
        if not self.truth[slot].holders:
            del self.truth[slot]

    @precondition(lambda self: self.in_state(PageState.ARRIVING))
    @rule(pick=picks)
    def fill(self, pick: int) -> None:
        slots = self.in_state(PageState.ARRIVING)
        slot = slots[pick % len(slots)]
        self.windows.fill(slot)
        self.truth[slot].filled, self.truth[slot].writer = True, None

    @rule(hashes=chains)
    def pin(self, hashes: list[BlockHash]) -> None:
        self.pool.pin(hashes)
        self.pins.append(hashes)

    @precondition(lambda self: self.pins)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        before = self.in_state(PageState.PINNED)
        hashes = self.pins.pop(pick % len(self.pins))
        self.pool.unpin(hashes)
        for block_hash in hashes[-TAIL:]:
            slot = self.slot_of(block_hash)
            if slot in before and slot in self.in_state(PageState.CACHED):
                self.clock += 1
                self.truth[slot].released_at = self.clock

    @rule(is_rare=st.integers(0, 4))
    def forget_cached(self, is_rare: int) -> None:
        if is_rare:
            return
        cached = self.in_state(PageState.CACHED)
        self.pool.forget_cached()
        for slot in cached:
            del self.truth[slot]

    # What always holds

    @invariant()
    def parts_and_oracle_agree(self) -> None:
        self.pool.check_integrity()
        for state in PageState:
            expected = SLOTS - len(self.truth) if state is PageState.FREE else len(self.in_state(state))
            assert self.windows.count(state) == expected, state
        assert self.told.blocks == self.readable()
        for slot, part in self.truth.items():
            assert self.windows.writer(slot) == part.writer
            assert self.windows.is_filled(slot) == part.filled
            assert self.windows.is_wanted(slot) == (part.holders > 0)
            if part.hash is not None:
                assert self.windows.find(part.hash) == (slot if part.filled else None)

    @invariant()
    def a_hit_has_all_pages_and_the_last_window_parts(self) -> None:
        for holder in self.holders:
            depth, pages, parts = 0, self.listener.blocks, self.readable()
            for end in range(len(holder.hashes) + 1):
                if set(holder.hashes[:end]) <= pages and set(holder.hashes[max(0, end - TAIL) : end]) <= parts:
                    depth = end
            assert self.pool.hits(holder.hashes) == depth

    def teardown(self) -> None:
        while self.holders:
            self.end(0)
        for slot in list(self.truth):
            self.windows.clear_writer(slot)
        for page in range(PAGES):
            self.pool.clear_writer(PageId(page))
        assert self.windows.unheld == SLOTS
        self.pool.unpin_all()
        self.pool.check_integrity()


TestWindowHistory = WindowHistory.TestCase
TestWindowHistory.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
