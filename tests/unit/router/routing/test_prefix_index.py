"""The prefix index against a brute-force oracle and against real event logs."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.prefix_index import Applied, PrefixIndex
from tests.unit.router.index_blocks import hashes_of
from twostroke.base.ids import BlockHash, Epoch, WorkerId
from twostroke.kv_cache.block import HASH_BYTES, block_hashes_of
from twostroke.kv_cache.events import EventBatch, EventLog
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.rpc.convert import hashes_from_bytes
from twostroke.rpc.events import batch_from_message, batch_to_message

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
EPOCH = Epoch(1, 7)


def digest_of(hashes: set[BlockHash]) -> bytes:
    xor = 0
    for block_hash in hashes:
        xor ^= int.from_bytes(block_hash, "big")
    return xor.to_bytes(HASH_BYTES, "big")


def name(number: int) -> BlockHash:
    return BlockHash(random.Random(number).randbytes(HASH_BYTES))


def snapshot(hashes: set[BlockHash], sequence: int = 0) -> EventBatch:
    return EventBatch(sequence, tuple(hashes), (), len(hashes), digest_of(hashes), snapshot=True)


def held(index: PrefixIndex, worker: WorkerId, count: int, epoch: Epoch = EPOCH) -> list[BlockHash]:
    """`worker` holds the first `count` blocks of one common chain; the chain's hashes."""
    chain = block_hashes_of(list(range(640)), 16)
    assert index.apply(worker, epoch, snapshot(set(chain[:count]))) is Applied.APPLIED
    return chain


def test_leading_blocks_are_counted_for_every_worker_that_holds_the_first() -> None:
    index = PrefixIndex()
    held(index, A, 40), held(index, B, 7)
    chain = held(index, C, 0)
    assert index.leading_blocks(chain) == {A: (40,), B: (7,)}
    assert index.leading_blocks(chain[:5]) == {A: (5,), B: (5,)}
    assert index.leading_blocks([]) == {}


def test_depths_are_told_down_to_the_lowest_tier_that_a_worker_uses() -> None:
    index = PrefixIndex()
    chain = held(index, A, 3)
    log = EventLog(EPOCH)
    for place, block in enumerate(chain[:9]):
        log.stored(block, Tier.DEVICE if place < 2 else Tier.HOST)
    log.stored(chain[0], Tier.HOST)
    index.apply(B, EPOCH, log.snapshot())
    index.apply(B, EPOCH, log.publish())
    log = EventLog(EPOCH)
    for place, block in enumerate(chain[:9]):
        log.stored(block, Tier.HOST if place < 4 else Tier.DISK)
    index.apply(C, EPOCH, log.snapshot())
    index.apply(C, EPOCH, log.publish())
    assert index.leading_blocks(chain) == {A: (3,), B: (2, 9), C: (0, 4, 9)}
    assert index.leading_blocks(chain, lambda block: [C] if block in chain[:6] else ()) == {
        A: (3,),
        B: (2, 9),
        C: (6, 6, 9),
    }
    assert (len(index), index.block_count(B)) == (3 + 9 + 5, 10)


def test_window_parts_on_a_lower_tier_than_all_pages_make_a_depth_there() -> None:
    index, log = PrefixIndex(), EventLog(EPOCH)
    chain = held(index, B, 0)
    for place, block in enumerate(chain[:9]):
        log.stored(block)
        log.stored(block, Tier.DEVICE if place < 4 else Tier.DISK, GroupKind.FURTHER)
    index.apply(A, EPOCH, log.snapshot())
    index.apply(A, EPOCH, log.publish())
    assert index.leading_blocks(chain, tail_blocks=2) == {A: (4, 4, 9)}
    assert index.leading_blocks(chain[:7], tail_blocks=2) == {A: (4, 4, 7)}


def test_blocks_on_their_way_count_as_held() -> None:
    index = PrefixIndex()
    chain = held(index, A, 3)
    held(index, B, 0)
    coming = {chain[i]: [B] for i in range(10)}
    assert index.leading_blocks(chain, lambda block: coming.get(block, ())) == {A: (3,), B: (10,)}


def test_a_worker_that_is_forgotten_leaves_the_others_blocks() -> None:
    index = PrefixIndex()
    held(index, A, 4)
    chain = held(index, B, 6)
    index.forget(A)
    assert index.leading_blocks(chain) == {B: (6,)}
    assert len(index) == 6
    held(index, C, 2)
    assert index.leading_blocks(chain) == {B: (6,), C: (2,)}


def leave(index: PrefixIndex) -> None:
    index.forget(A)


def hold_nothing(index: PrefixIndex) -> None:
    index.apply(A, EPOCH, snapshot(set(), 99))


def begin_again(index: PrefixIndex) -> None:
    index.apply(A, Epoch(2, 1), snapshot(set(), 1))


@pytest.mark.parametrize("go", [leave, hold_nothing, begin_again])
@pytest.mark.parametrize("tier", list(Tier))
def test_what_a_worker_held_is_found_no_more_at_once_and_taken_out_in_parts(
    go: Callable[[PrefixIndex], None], tier: Tier
) -> None:
    index, blocks = PrefixIndex(sweep_blocks=4), [name(number) for number in range(10)]
    for worker, count in ((A, 10), (B, 3)):
        log = EventLog(EPOCH)
        for block in blocks[:count]:
            log.stored(block, tier)
        log.publish()
        assert index.apply(worker, EPOCH, log.snapshot()) is Applied.APPLIED
    go(index)
    assert index.has_gone
    sizes = []
    while index.has_gone:
        found = index.leading_blocks(blocks)
        assert {worker: depths[-1] for worker, depths in found.items()} == {B: 3}
        assert index.block_count(A) == 0
        sizes.append(len(index))
        index.sweep()
    assert all(before - after <= 4 for before, after in itertools.pairwise([*sizes, len(index)]))
    assert len(index) == 3


def test_a_block_that_only_a_worker_that_is_gone_held_counts_as_evicted() -> None:
    index = PrefixIndex(sweep_blocks=0)
    chain = held(index, A, 4)
    log = EventLog(EPOCH)
    for block in (chain[0], name(5)):
        log.stored(block)
    log.publish()
    index.apply(B, EPOCH, log.snapshot())
    log.removed(chain[0])
    index.forget(A)
    index.apply(B, EPOCH, log.publish())
    index.re_reference.asked([chain[0]])
    assert index.has_gone
    assert index.re_reference.rate == 1.0


def test_a_worker_that_comes_while_another_is_swept_does_not_get_its_blocks() -> None:
    index = PrefixIndex(sweep_blocks=1)
    chain = held(index, A, 6)
    index.forget(A)
    held(index, C, 2)
    assert index.leading_blocks(chain) == {C: (2,)}
    held(index, A, 1)
    assert index.has_gone
    while index.has_gone:
        index.sweep()
        assert index.leading_blocks(chain) == {C: (2,), A: (1,)}


def test_a_later_life_begins_without_the_earlier_ones_blocks() -> None:
    index = PrefixIndex()
    chain = held(index, A, 4)
    later = Epoch(2, 1)
    assert index.apply(A, later, EventBatch(9, (), (), 0, digest_of(set()))) is Applied.GAP
    assert index.leading_blocks(chain) == {}
    assert index.apply(A, EPOCH, snapshot(set(chain), 99)) is Applied.OLD
    assert index.leading_blocks(chain) == {}
    held(index, A, 2, later)
    assert index.leading_blocks(chain) == {A: (2,)}


@pytest.mark.parametrize("wrong", ["count", "digest"])
def test_a_batch_that_does_not_add_up_makes_the_index_ask_for_a_snapshot(wrong: str) -> None:
    index = PrefixIndex()
    chain = held(index, A, 2)
    truth = set(chain[:3])
    count = 4 if wrong == "count" else 3
    digest = digest_of(truth) if wrong == "count" else digest_of(set(chain[:2]))
    assert index.apply(A, EPOCH, EventBatch(1, (chain[2],), (), count, digest)) is Applied.DIVERGED
    assert index.next_sequence(A, EPOCH) is None
    assert index.snapshot(A) is None
    assert index.apply(A, EPOCH, EventBatch(2, (), (), 3, digest_of(truth))) is Applied.GAP
    assert index.apply(A, EPOCH, snapshot(truth, 2)) is Applied.APPLIED
    assert index.next_sequence(A, EPOCH) == 3


def test_an_index_that_takes_over_a_snapshot_of_another_is_equal_to_it() -> None:
    index, other = PrefixIndex(), PrefixIndex()
    chain = held(index, A, 11)
    batch = index.snapshot(A)
    assert batch is not None
    assert other.apply(A, EPOCH, batch) is Applied.APPLIED
    assert other.leading_blocks(chain) == {A: (11,)}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 60), max_size=6), min_size=1, max_size=5), st.integers(0, 60))
def test_galloping_finds_what_a_scan_finds(forks: list[list[int]], own: int) -> None:
    """Several workers hold prefix-closed parts of a tree of prompts."""
    index = PrefixIndex()
    held_by: dict[WorkerId, set[BlockHash]] = {}
    for number, lengths in enumerate(forks):
        hashes: set[BlockHash] = set()
        for fork, length in enumerate(lengths):
            hashes.update(block_hashes_of([0] * 16 * (length // 2) + [fork] * 16 * (length - length // 2), 16))
        held_by[WorkerId(str(number))] = hashes
        index.apply(WorkerId(str(number)), EPOCH, snapshot(hashes))
    for fork in range(3):
        prompt = block_hashes_of([0] * 16 * (own // 2) + [fork] * 16 * (own - own // 2), 16)
        expected = {}
        for worker, hashes in held_by.items():
            depth = next((i for i, block in enumerate(prompt) if block not in hashes), len(prompt))
            if depth:
                expected[worker] = (depth,)
        assert index.leading_blocks(prompt) == expected


class Wire:
    """Delivers a worker's batches badly, and does what a reader's shell does about it."""

    def __init__(self, worker: WorkerId) -> None:
        self.worker = worker
        self.incarnation = 0
        self.log = EventLog(Epoch(0, 0))
        self.history: list[tuple[Epoch, EventBatch]] = []

    def begin_epoch(self) -> None:
        self.incarnation += 1
        self.log = EventLog(Epoch.begin(self.incarnation))
        self.held: set[BlockHash] = set()

    def change(self, numbers: list[int]) -> None:
        for number in numbers:
            block = name(number)
            if block in self.held:
                self.held.remove(block), self.log.removed(block)
            else:
                self.held.add(block), self.log.stored(block)
        self.history.append((self.log.epoch, self.log.publish()))

    def ask_again(self, index: PrefixIndex) -> None:
        following = index.next_sequence(self.worker, self.log.epoch)
        batches = self.log.since(following) if following is not None else None
        for batch in [self.log.snapshot()] if batches is None else batches:
            assert index.apply(self.worker, self.log.epoch, batch) in (Applied.APPLIED, Applied.OLD)


def sweep_all(index: PrefixIndex) -> None:
    while index.has_gone:
        index.sweep()


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["change", "change", "change", "lose", "repeat", "old", "restart", "corrupt"]),
        st.lists(st.integers(0, 12), unique=True, max_size=5),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_whatever_gets_lost_repeated_or_reordered_an_applied_batch_means_equality(
    events: list[tuple[int, str, list[int]]],
) -> None:
    index = PrefixIndex(sweep_blocks=2)
    wires = [Wire(A), Wire(B)]
    for wire in wires:
        wire.begin_epoch()
        wire.ask_again(index)
    for which, kind, numbers in events:
        index.sweep()
        wire = wires[which]
        if kind == "restart":
            wire.begin_epoch()
            wire.ask_again(index)
        elif kind in ("repeat", "old") and wire.history:
            index.apply(wire.worker, *wire.history[-1 if kind == "repeat" else 0])
        else:
            wire.change(numbers)
            epoch, batch = wire.history[-1]
            if kind == "lose":
                continue
            if kind == "corrupt":
                batch = EventBatch(batch.sequence, (*batch.stored, name(99)), batch.removed, 0, batch.digest)
            verdict = index.apply(wire.worker, epoch, batch)
            if verdict is Applied.APPLIED:
                assert hashes_of(index, wire.worker) == wire.held
            elif verdict in (Applied.GAP, Applied.DIVERGED):
                wire.ask_again(index)
                assert hashes_of(index, wire.worker) == wire.held
    for wire in wires:
        wire.change([])
        wire.ask_again(index)
        assert hashes_of(index, wire.worker) == wire.held
        shown = index.snapshot(wire.worker)
        assert shown is not None
        assert shown.digest == digest_of(wire.held)
    holders = {block: {w.worker for w in wires if block in w.held} for w in wires for block in w.held}
    sweep_all(index)
    assert len(index) == len(holders)
    for block, workers in holders.items():
        assert set(index.leading_blocks([block])) == workers


def test_a_block_that_only_moves_down_a_tier_is_not_evicted() -> None:
    index, log = PrefixIndex(), EventLog(EPOCH)
    index.apply(A, EPOCH, log.snapshot())
    for number in range(4):
        log.stored(name(number))
    index.apply(A, EPOCH, log.publish())
    for number in range(2):
        log.removed(name(number))
    log.stored(name(0), Tier.HOST)
    index.apply(A, EPOCH, log.publish())
    index.re_reference.asked([name(0), name(1)])
    assert index.re_reference.rate == 1.0, "one was evicted, and that one was asked for"


def test_a_block_weighs_less_than_200_bytes_per_holder() -> None:
    """At the sizes at which every dict has just grown, and every block has one holder: the worst there is."""
    workers, blocks = 64, 683
    hashes = [random.Random(number).randbytes(HASH_BYTES * blocks) for number in range(workers)]
    tracemalloc.start()
    try:
        index, empty_bytes = PrefixIndex(), tracemalloc.get_traced_memory()[0]
        for number, raw in enumerate(hashes):
            log, worker = EventLog(EPOCH), WorkerId(str(number))
            index.apply(worker, EPOCH, log.snapshot())
            for block in hashes_from_bytes(raw):
                log.stored(block)
            message = batch_to_message(worker, EPOCH, log.publish())
            del log
            assert index.apply(worker, EPOCH, batch_from_message(message)) is Applied.APPLIED
        del message
        grown_bytes = tracemalloc.get_traced_memory()[0] - empty_bytes
    finally:
        tracemalloc.stop()
    assert len(index) == workers * blocks
    rounding_bytes = 15  # objects of 49 bytes are given 64
    assert grown_bytes / len(index) + rounding_bytes < 200
