"""Long batches come in parts: what the index makes of hostile orders, and what the router's own subscribers see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator

import pytest

from router.routing.event_relay import EventRelay
from router.routing.prefix_index import Applied, PrefixIndex
from tests.unit.router.index_blocks import hashes_of
from twostroke.base.ids import BlockHash, Epoch, WorkerId
from twostroke.kv_cache import events
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.events import EventBatch, EventLog, parts_of
from twostroke.kv_cache.tier import Tier
from twostroke.rpc.events import batch_from_message, batch_to_message
from twostroke.rpc.server import MAX_MESSAGE_BYTES
from twostroke.rpc.v1.control_pb2 import KvEventBatch, SubscribeKvEventsRequest
from twostroke.worker.event_feed import EventFeed

A = WorkerId("a")
EPOCH, LATER = Epoch(1, 7), Epoch(2, 3)
BLOCKS = 100


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PART_BLOCKS", 16)


def log_of(count: int = BLOCKS, epoch: Epoch = EPOCH) -> EventLog:
    log = EventLog(epoch)
    for block_hash in block_hashes_of(range(count), 1):
        log.stored(block_hash)
    log.publish()
    return log


def apply_all(index: PrefixIndex, parts: Iterable[EventBatch], worker: WorkerId = A, epoch: Epoch = EPOCH) -> Applied:
    verdicts = [index.apply(worker, epoch, part) for part in parts]
    assert set(verdicts[:-1]) <= {Applied.PARTIAL}
    return verdicts[-1]


def test_all_parts_of_a_snapshot_make_the_index_equal_and_fewer_do_not() -> None:
    log, index = log_of(), PrefixIndex()
    *first, last = log.snapshot_parts()
    assert len(first) > 3
    assert apply_all(index, first) is Applied.PARTIAL
    assert index.next_sequence(A, EPOCH) is None
    assert index.snapshot(A) is None
    assert index.apply(A, EPOCH, last) is Applied.APPLIED
    assert index.next_sequence(A, EPOCH) == log.sequence + 1
    assert hashes_of(index, A) == set(block_hashes_of(range(BLOCKS), 1))


@pytest.mark.parametrize("parts", [parts_of, lambda batch: None], ids=["batch", "snapshot"])
def test_an_index_that_was_right_is_not_amid_the_parts_of_what_follows(
    parts: Callable[[EventBatch], Iterator[EventBatch] | None],
) -> None:
    log, index = log_of(), PrefixIndex()
    assert apply_all(index, log.snapshot_parts()) is Applied.APPLIED
    for block_hash in block_hashes_of(range(1, BLOCKS), 1):
        log.stored(block_hash)
    *first, last = parts(log.publish()) or log.snapshot_parts()
    for part in first:
        assert index.apply(A, EPOCH, part) is Applied.PARTIAL
        assert (index.next_sequence(A, EPOCH), index.snapshot(A), list(index.snapshot_parts(A))) == (None, None, [])
    assert index.apply(A, EPOCH, last) is Applied.APPLIED
    assert len(hashes_of(index, A)) == 2 * BLOCKS - 1


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_lost_part_is_a_gap_and_a_whole_snapshot_mends_it(lost: int) -> None:
    log, index = log_of(), PrefixIndex()
    parts = list(log.snapshot_parts())
    verdicts = [index.apply(A, EPOCH, part) for part in parts if part.part != lost]
    assert verdicts[lost:] == [Applied.GAP] * (len(parts) - lost - 1)
    assert index.next_sequence(A, EPOCH) is None
    assert apply_all(index, log.snapshot_parts()) is Applied.APPLIED


def test_a_stream_that_is_cut_between_two_parts_is_followed_by_a_snapshot() -> None:
    log, index = log_of(), PrefixIndex()
    for part, _ in zip(log.snapshot_parts(), range(3), strict=False):
        assert index.apply(A, EPOCH, part) is Applied.PARTIAL
    log.stored(block_hashes_of([7, 7], 2)[0])
    assert index.apply(A, EPOCH, log.publish()) is Applied.GAP
    assert apply_all(index, log.snapshot_parts()) is Applied.APPLIED
    assert index.block_count(A) == BLOCKS + 1


def test_an_epoch_that_begins_between_two_parts_leaves_none_of_the_old_ones_blocks() -> None:
    old, new, index = log_of(), log_of(40, LATER), PrefixIndex()
    parts = list(old.snapshot_parts())
    assert apply_all(index, parts[:3]) is Applied.PARTIAL
    fresh = list(new.snapshot_parts())
    assert index.apply(A, LATER, fresh[1]) is Applied.GAP, "its first part is missing"
    assert index.block_count(A) == 0
    assert index.apply(A, LATER, fresh[0]) is Applied.PARTIAL
    assert index.apply(A, EPOCH, parts[3]) is Applied.OLD
    assert apply_all(index, fresh[1:], epoch=LATER) is Applied.APPLIED
    assert hashes_of(index, A) == set(block_hashes_of(range(40), 1))


def test_parts_that_come_again_after_the_last_one_change_nothing() -> None:
    log, index = log_of(), PrefixIndex()
    parts = list(log.snapshot_parts())
    apply_all(index, parts)
    assert [index.apply(A, EPOCH, part) for part in parts[1:]] == [Applied.OLD] * (len(parts) - 1)
    assert index.block_count(A) == BLOCKS


def test_a_part_with_a_wrong_block_is_found_by_the_last_one() -> None:
    log, index = log_of(), PrefixIndex()
    *first, last = log.snapshot_parts()
    stranger = block_hashes_of([9, 9], 2)[0]
    wrong = [EventBatch(1, (stranger,), (), BLOCKS, last.digest, snapshot=True, part=0, more=True), *first[1:]]
    assert apply_all(index, wrong) is Applied.PARTIAL
    assert index.apply(A, EPOCH, last) is Applied.DIVERGED
    assert index.next_sequence(A, EPOCH) is None


def test_long_batches_follow_one_another_and_a_dropped_cache_clears_before_its_first_part() -> None:
    log, index = EventLog(EPOCH), PrefixIndex()
    apply_all(index, log.snapshot_parts())
    for block_hash in block_hashes_of(range(BLOCKS), 1):
        log.stored(block_hash, Tier.DISK)
    assert apply_all(index, parts_of(log.publish())) is Applied.APPLIED
    for block_hash in block_hashes_of(range(BLOCKS), 1)[40:]:
        log.removed(block_hash, Tier.DISK)
    batch = log.publish()
    assert batch.cleared
    assert apply_all(index, parts_of(batch)) is Applied.APPLIED
    assert index.block_count(A) == 40
    assert index.apply(A, EPOCH, batch) is Applied.OLD


def test_blocks_that_only_moved_down_do_not_count_as_evicted_however_the_batch_is_cut() -> None:
    log, index = log_of(), PrefixIndex()
    apply_all(index, log.snapshot_parts())
    for block_hash in block_hashes_of(range(BLOCKS), 1)[:45]:
        log.removed(block_hash)
        log.stored(block_hash, Tier.HOST)
    apply_all(index, parts_of(log.publish()))
    assert index.re_reference._evicted == 0


async def test_what_happens_while_a_snapshot_is_sent_follows_it_in_order() -> None:
    feed, index = EventFeed(log_of(), heartbeat_s=60), PrefixIndex()
    later = iter(block_hashes_of([5] * 600, 2))
    sequences: list[int] = []
    async for part in feed.follow("", 0):
        sequences.append(part.sequence)
        assert index.apply(A, EPOCH, part) in (Applied.PARTIAL, Applied.APPLIED)
        if part.sequence == 12:
            break
        feed.log.stored(next(later))
        feed.log.removed(block_hashes_of(range(BLOCKS), 1)[len(sequences)])
        feed.publish()
    assert sequences == sorted(sequences)
    assert sequences.count(1) > 3
    assert index.block_count(A) == BLOCKS


async def test_a_snapshot_of_hundreds_of_thousands_of_blocks_is_many_small_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    log, index = EventLog(EPOCH), PrefixIndex()
    for number in range(300_000):
        log.stored(BlockHash(((number * 0x9E3779B97F4A7C15F39CC0605CEDC835) % 2**128).to_bytes(16, "big")), Tier.DISK)
    feed, turns, largest = EventFeed(log, heartbeat_s=60), 0, 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    messages = 0
    async for part in feed.follow("", 0):
        message = batch_to_message(A, EPOCH, part)
        largest = max(largest, message.ByteSize())
        messages += 1
        await asyncio.sleep(0)  # as gRPC does when it sends one
        if index.apply(A, EPOCH, batch_from_message(message)) is Applied.APPLIED:
            break
    counting.cancel()
    assert index.block_count(A) == 300_000
    assert messages >= 300_000 // events.PART_BLOCKS
    assert turns >= messages
    assert largest < MAX_MESSAGE_BYTES / 100


async def read(stream: AsyncIterator[KvEventBatch], until: int) -> list[KvEventBatch]:
    """Messages up to the last part of the batch of that number."""
    read: list[KvEventBatch] = []
    async with asyncio.timeout(60):
        while not read or read[-1].sequence < until or read[-1].more:
            read.append(await anext(stream))
    return read


def messages_of(parts: Iterable[EventBatch]) -> Iterator[KvEventBatch]:
    return (batch_to_message(A, EPOCH, part) for part in parts)


async def test_a_subscriber_that_comes_between_two_parts_gets_a_snapshot_once_all_have_come() -> None:
    log, index, copy = log_of(), PrefixIndex(), PrefixIndex()
    relay = EventRelay(index)
    parts = list(log.snapshot_parts())
    apply_all(index, parts[:3])
    stream = relay.subscribe(SubscribeKvEventsRequest())
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    for part, message in zip(parts[3:], messages_of(parts[3:]), strict=True):
        index.apply(A, EPOCH, part)
        relay.publish(message)
    async with asyncio.timeout(60):
        first = await waiting
    rest = await read(stream, log.sequence)
    assert first.part == 0
    assert apply_all(copy, map(batch_from_message, [first, *rest])) is Applied.APPLIED
    assert hashes_of(copy, A) == set(block_hashes_of(range(BLOCKS), 1))


async def test_a_subscriber_gets_what_happens_while_it_reads_a_snapshot_after_the_snapshot() -> None:
    log, index, copy = log_of(), PrefixIndex(), PrefixIndex()
    relay = EventRelay(index)
    apply_all(index, log.snapshot_parts())
    stream = relay.subscribe(SubscribeKvEventsRequest())
    first = await anext(stream)
    log.stored(block_hashes_of([7, 7], 2)[0])
    batch = log.publish()
    index.apply(A, EPOCH, batch)
    relay.publish(batch_to_message(A, EPOCH, batch))
    messages = [first, *await read(stream, batch.sequence)]
    verdicts = [copy.apply(A, EPOCH, batch_from_message(message)) for message in messages]
    assert verdicts[-2:] == [Applied.APPLIED, Applied.APPLIED]
    assert copy.block_count(A) == BLOCKS + 1


def everything_changes(index: PrefixIndex, log: EventLog) -> None:
    blocks = block_hashes_of(range(BLOCKS), 1)
    for block_hash in blocks[BLOCKS // 2 :]:
        log.removed(block_hash)
        log.stored(block_hash, Tier.HOST)
    for block_hash in block_hashes_of(range(1, BLOCKS), 1):
        log.stored(block_hash)
    assert index.apply(A, EPOCH, log.publish()) is Applied.APPLIED


def it_holds_nothing(index: PrefixIndex, log: EventLog) -> None:
    assert apply_all(index, EventLog(EPOCH).snapshot_parts()) is Applied.APPLIED


def it_leaves(index: PrefixIndex, log: EventLog) -> None:
    index.forget(A)


@pytest.mark.parametrize("change", [everything_changes, it_holds_nothing, it_leaves])
@pytest.mark.parametrize("parts_before", [1, 2, 5])
def test_a_snapshot_of_the_index_is_as_of_its_first_part_whatever_changes_between_two(
    change: Callable[[PrefixIndex, EventLog], None], parts_before: int
) -> None:
    log, index, copy = log_of(), PrefixIndex(sweep_blocks=30), PrefixIndex()
    apply_all(index, log.snapshot_parts())
    parts = index.snapshot_parts(A)
    taken = [next(parts) for _ in range(parts_before)]
    change(index, log)
    while index.has_gone:
        index.sweep()
    taken += parts
    assert len(taken) > 5
    assert apply_all(copy, taken) is Applied.APPLIED
    assert hashes_of(copy, A) == set(block_hashes_of(range(BLOCKS), 1))
    assert not hashes_of(copy, A, Tier.HOST)


async def test_a_snapshot_for_a_subscriber_is_made_part_by_part_and_given_up_when_it_leaves() -> None:
    log, index = log_of(), PrefixIndex()
    apply_all(index, log.snapshot_parts())
    made: list[EventBatch] = []
    make = index.snapshot_parts

    def counted(worker: WorkerId) -> Generator[EventBatch]:
        try:
            for part in make(worker):
                made.append(part)
                yield part
        finally:
            ended.set()

    ended = asyncio.Event()
    index.snapshot_parts = counted  # type: ignore[method-assign]  # it tells when a part is made
    stream = EventRelay(index).subscribe(SubscribeKvEventsRequest())
    for count in (1, 2, 3):
        await anext(stream)
        assert len(made) == count
    await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
    assert ended.is_set()
