"""Random histories of a pool and its event log against an oracle that is slow and obviously right."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twostroke.base.ids import BlockHash, Epoch, PageId, SessionId
from twostroke.kv_cache.block import HASH_BYTES, block_hashes_of, hash_block, root_hash
from twostroke.kv_cache.events import EventBatch, EventLog
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.pool import BlockPool

ROOT = root_hash()
chains = st.lists(st.integers(0, 1), max_size=5).map(lambda tokens: block_hashes_of(tokens, 1))
picks = st.integers(0, 10**6)


@dataclass
class Truth:
    """What one page that is not free must be."""

    hash: BlockHash | None = None
    parent: BlockHash | None = None
    filled: bool = False
    holders: int = 1
    writer: SessionId | None = None
    released_at: int = 0

    def state(self, pinned: Container[BlockHash | None]) -> PageState:
        if self.holders:
            return PageState.ARRIVING if self.hash is not None and not self.filled else PageState.ACTIVE
        if not self.filled:
            return PageState.QUARANTINED
        return PageState.PINNED if self.hash in pinned else PageState.CACHED


@dataclass
class Listener:
    """Hands the pool's news on to an event log, and keeps what an eviction took."""

    log: EventLog
    removed_hashes: list[BlockHash] = field(default_factory=list)
    written: list[PageId] = field(default_factory=list)

    def stored(self, block_hashes: Sequence[BlockHash]) -> None:
        for block_hash in block_hashes:
            self.log.stored(block_hash)

    def removed(self, block_hashes: Sequence[BlockHash]) -> None:
        self.removed_hashes += block_hashes
        for block_hash in block_hashes:
            self.log.removed(block_hash)

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None: ...

    def forgotten(self, block_hash: BlockHash) -> None: ...

    def new_writers(self, pages: Sequence[PageId]) -> None:
        self.written += pages


class Reader:
    """Follows the log as a router would."""

    def __init__(self) -> None:
        self.blocks: set[BlockHash] = set()
        self.next_sequence = 1

    def follow(self, log: EventLog) -> None:
        batches = log.since(self.next_sequence)
        for batch in [log.snapshot()] if batches is None else batches:
            self.apply(batch)

    def apply(self, batch: EventBatch) -> None:
        if batch.snapshot:
            self.blocks = set(batch.stored)
        else:
            assert batch.sequence == self.next_sequence
            if batch.cleared:
                self.blocks = set()
            assert not set(batch.stored) & self.blocks, "stored twice"
            assert set(batch.removed) <= self.blocks, "removed what was not there"
            self.blocks = (self.blocks | set(batch.stored)) - set(batch.removed)
        self.next_sequence = batch.sequence + 1
        assert len(self.blocks) == batch.block_count
        assert digest_of(self.blocks) == batch.digest


def digest_of(blocks: set[BlockHash]) -> bytes:
    digest = bytes(HASH_BYTES)
    for block_hash in blocks:
        digest = bytes(a ^ b for a, b in zip(digest, block_hash, strict=True))
    return digest


class PoolHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log = EventLog(Epoch(1, 2))
        self.listener = Listener(self.log)
        self.pool = BlockPool(7, self.listener)
        self.truth: dict[PageId, Truth] = {}
        self.holds: list[list[PageId]] = []
        self.pins: list[list[BlockHash]] = []
        self.clock = 0
        self.sessions = 0
        self.reader = Reader()

    # The oracle's own words

    def held_by_hash(self, block_hash: BlockHash) -> PageId | None:
        return next((page for page, truth in self.truth.items() if truth.hash == block_hash), None)

    def pinned(self) -> set[BlockHash]:
        return {block_hash for hashes in self.pins for block_hash in hashes}

    def in_state(self, *states: PageState) -> list[PageId]:
        pinned = self.pinned()
        return sorted(page for page, truth in self.truth.items() if truth.state(pinned) in states)

    def readable(self) -> set[BlockHash]:
        return {truth.hash for truth in self.truth.values() if truth.filled and truth.hash is not None}

    def room(self) -> int:
        return self.pool.total - len(self.truth) + len(self.in_state(PageState.CACHED))

    def evictions(self, protected: list[PageId]) -> list[PageId]:
        """Every cached page that may go, in the order in which it must: the oldest leaf first."""
        left = dict(self.truth)
        pinned = self.pinned()
        order: list[PageId] = []
        while True:
            cached = [p for p, t in left.items() if t.state(pinned) is PageState.CACHED and p not in protected]
            if not cached:
                return order
            parents = {truth.parent for truth in left.values() if truth.hash is not None}
            leaves = [page for page in cached if left[page].hash not in parents]
            gone = min(leaves or cached, key=lambda page: left[page].released_at)
            order.append(gone)
            del left[gone]

    def expect_taken(self, pages: list[PageId], protected: list[PageId]) -> None:
        """`pages` are new; what had to be evicted for them is what the oracle would have evicted."""
        free = self.pool.total - len(self.truth)
        evicted = self.evictions(protected)[: max(0, len(pages) - free)]
        assert self.listener.removed_hashes == [self.truth[page].hash for page in evicted]
        for page in evicted:
            del self.truth[page]
        assert self.listener.written == pages
        assert len(set(pages)) == len(pages)
        assert not set(pages) & set(self.truth)
        self.listener.removed_hashes.clear()
        self.listener.written.clear()

    def fill_truth(self, page: PageId) -> None:
        self.truth[page].filled = True
        self.truth[page].writer = None

    # What happens to a pool

    @rule(hashes=chains, private=st.integers(0, 3))
    def claim(self, hashes: list[BlockHash], private: int) -> None:
        before = [self.held_by_hash(block_hash) for block_hash in hashes]
        here = [page for page in before if page is not None]
        missing = [index for index, page in enumerate(before) if page is None]
        woken = len(set(here) & set(self.in_state(PageState.CACHED)))
        hits = 0
        while hits < len(hashes) and hashes[hits] in self.readable():
            hits += 1
        claim = self.pool.claim(hashes, ROOT, private)
        if len(missing) + private > self.room() - woken:
            assert claim is None
            return
        assert claim is not None
        assert (claim.missing, claim.hits) == (missing, hits)
        assert [claim.pages[index] for index, page in enumerate(before) if page is not None] == here
        taken = [claim.pages[index] for index in missing] + claim.pages[len(hashes) :]
        self.expect_taken(taken, protected=here)
        for page in here:
            self.truth[page].holders += 1
        for index in missing:
            self.truth[claim.pages[index]] = Truth(hashes[index], hashes[index - 1] if index else ROOT)
        for page in claim.pages[len(hashes) :]:
            self.truth[page] = Truth()
        self.holds.append(list(claim.pages))

    @precondition(lambda self: self.holds)
    @rule(pick=picks)
    def grow(self, pick: int) -> None:
        had_room = self.room() > 0
        page = self.pool.claim_private()
        assert (page is not None) == had_room
        if page is not None:
            self.expect_taken([page], protected=[])
            self.truth[page] = Truth()
            self.holds[pick % len(self.holds)].append(page)

    @rule(hashes=chains)
    def share(self, hashes: list[BlockHash]) -> None:
        shared = self.pool.share_filled(dict(enumerate(hashes)))
        assert shared == {
            block: self.held_by_hash(block_hash)
            for block, block_hash in enumerate(hashes)
            if block_hash in self.readable()
        }
        pages = list(shared.values())
        for page in pages:
            self.truth[page].holders += 1
        self.holds.append(pages)

    @rule(hashes=chains)
    def pin(self, hashes: list[BlockHash]) -> None:
        """Also blocks that are not here, and those that another pin keeps already."""
        self.pool.pin(hashes)
        self.pins.append(hashes)

    @precondition(lambda self: self.pins)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        self.pool.unpin(self.pins.pop(pick % len(self.pins)))

    @rule(is_rare=st.integers(0, 4))
    def unpin_all(self, is_rare: int) -> None:
        if not is_rare:
            self.pool.unpin_all()
            self.pins.clear()

    @precondition(lambda self: self.in_state(PageState.CACHED, PageState.PINNED))
    @rule(pick=picks)
    def forget(self, pick: int) -> None:
        """One block, as after numbers that overflowed: it goes, pinned or not, unless another one follows it."""
        unheld = self.in_state(PageState.CACHED, PageState.PINNED)
        page = unheld[pick % len(unheld)]
        is_parent = any(truth.parent == self.truth[page].hash for truth in self.truth.values())
        self.pool.forget([page])
        if not is_parent:
            assert self.listener.removed_hashes == [self.truth[page].hash]
            del self.truth[page]
        self.listener.removed_hashes.clear()

    @precondition(lambda self: self.holds)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        pages = self.holds.pop(pick % len(self.holds))
        self.pool.release(pages)
        for page in reversed(pages):
            truth = self.truth[page]
            truth.holders -= 1
            if truth.holders:
                continue
            self.clock += 1
            truth.released_at = self.clock
            if not truth.filled:
                truth.hash = truth.parent = None
                if truth.writer is None:
                    del self.truth[page]

    @precondition(lambda self: self.in_state(PageState.ARRIVING))
    @rule(pick=picks)
    def begin_writing(self, pick: int) -> None:
        pages = [page for page in self.in_state(PageState.ARRIVING) if self.truth[page].writer is None]
        if pages:
            page = pages[pick % len(pages)]
            self.sessions += 1
            self.pool.assign_writer(page, SessionId(self.sessions))
            self.truth[page].writer = SessionId(self.sessions)

    @precondition(lambda self: any(truth.writer for truth in self.truth.values()))
    @rule(pick=picks)
    def give_up_writing(self, pick: int) -> None:
        pages = sorted(page for page, truth in self.truth.items() if truth.writer)
        page = pages[pick % len(pages)]
        self.pool.clear_writer(page)
        self.truth[page].writer = None
        if not self.truth[page].holders:
            del self.truth[page]

    @precondition(lambda self: self.in_state(PageState.ARRIVING))
    @rule(pick=picks)
    def fill(self, pick: int) -> None:
        pages = self.in_state(PageState.ARRIVING)
        page = pages[pick % len(pages)]
        self.pool.fill(page)
        self.fill_truth(page)

    @precondition(lambda self: any(t.holders and t.hash is None for t in self.truth.values()))
    @rule(pick=picks, parents=chains, token=st.integers(0, 1))
    def complete_private(self, pick: int, parents: list[BlockHash], token: int) -> None:
        """Also below parents that are not here, or only as a private twin."""
        pages = sorted(page for page, truth in self.truth.items() if truth.holders and truth.hash is None)
        page = pages[pick % len(pages)]
        parent = parents[-1] if parents else ROOT
        block_hash = hash_block(parent, [token])
        is_twin = self.held_by_hash(block_hash) is not None
        self.pool.register_private(page, block_hash, parent)
        if not is_twin:
            self.truth[page].hash, self.truth[page].parent = block_hash, parent
            self.fill_truth(page)

    @rule(is_rare=st.integers(0, 4))
    def forget_cached(self, is_rare: int) -> None:
        if is_rare:
            return
        cached = self.in_state(PageState.CACHED)
        assert self.pool.forget_cached() == len(cached)
        for page in cached:
            del self.truth[page]
        self.listener.removed_hashes.clear()

    @rule()
    def publish(self) -> None:
        batch = self.log.publish()
        assert batch.block_count == len(self.readable())
        assert batch.digest == digest_of(self.readable())
        assert not set(batch.stored) & set(batch.removed)

    @rule()
    def read_the_log(self) -> None:
        self.reader.follow(self.log)
        if not self.log.has_changes:
            assert self.reader.blocks == self.readable()

    @rule()
    def begin_reading_with_a_snapshot(self) -> None:
        self.reader = Reader()
        self.reader.apply(self.log.snapshot())

    # What always holds

    @invariant()
    def pool_and_oracle_agree(self) -> None:
        self.pool.check_integrity()
        for state in PageState:
            expected = self.pool.total - len(self.truth) if state is PageState.FREE else len(self.in_state(state))
            assert self.pool.count(state) == expected, state
        assert self.pool.available == self.room()
        assert self.pool.unheld == self.room() + len(self.in_state(PageState.PINNED))
        assert self.pool.pinned_blocks == len(self.pinned())
        unheld = self.in_state(PageState.CACHED, PageState.PINNED)
        assert {block.hash for block in self.pool.cached()} == {self.truth[page].hash for page in unheld}
        for page, truth in self.truth.items():
            assert self.pool.writer(page) == truth.writer
            assert self.pool.is_filled(page) == truth.filled
            assert self.pool.is_wanted(page) == (truth.holders > 0)
            assert self.pool.is_arriving(page) == (truth.state(()) is PageState.ARRIVING)
            if truth.hash is not None:
                assert self.pool.find(truth.hash) == (page if truth.filled else None)

    def teardown(self) -> None:
        for pages in self.holds:
            self.pool.release(pages)
        for page in range(self.pool.total):
            self.pool.clear_writer(PageId(page))
        self.pool.check_integrity()
        assert self.pool.unheld == self.pool.total
        self.pool.unpin_all()
        self.pool.check_integrity()
        assert self.pool.available == self.pool.total
        self.log.publish()
        self.reader.follow(self.log)
        assert self.reader.blocks == self.readable()


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
