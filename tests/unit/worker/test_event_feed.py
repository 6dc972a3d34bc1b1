"""The event log as its subscribers see it: snapshot, replay, heartbeat, digest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import TOKEN, decode, eventually, prefill, prompt_of
from twostroke.base.ids import BlockHash, Epoch
from twostroke.config import PatienceConfig
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.events import RING_BATCHES, EventBatch, EventLog
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.convert import hashes_from_bytes
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc
from twostroke.worker.event_feed import EventFeed

EPOCH = Epoch(3, 77)
OFTEN, SELDOM = PatienceConfig(heartbeat_s=0.05), PatienceConfig(heartbeat_s=60, suspect_after_s=120, dead_after_s=240)
A, B, C = (BlockHash(bytes([letter] * 16)) for letter in b"abc")


@pytest.fixture
def feed() -> EventFeed:
    return EventFeed(EventLog(EPOCH), heartbeat_s=0.02)


def published(feed: EventFeed, *hashes: BlockHash) -> None:
    for name in hashes:
        feed.log.stored(name)
    feed.publish()


async def take(batches: AsyncIterator[EventBatch], count: int) -> list[EventBatch]:
    async with asyncio.timeout(60):
        return [await anext(batches) for _ in range(count)]


def following(feed: EventFeed, epoch: str, start: int) -> AsyncGenerator[EventBatch, None]:
    batches = feed.follow(epoch, start)
    assert isinstance(batches, AsyncGenerator)
    return batches


@pytest.mark.parametrize("start", [1, 2, 3])
async def test_a_follower_gets_every_batch_from_where_it_starts(feed: EventFeed, start: int) -> None:
    for name in (A, B, C):
        published(feed, name)
    async with contextlib.aclosing(following(feed, str(EPOCH), start)) as batches:
        assert [batch.sequence for batch in await take(batches, 4 - start)] == list(range(start, 4))
        feed.log.removed(A)
        feed.publish()
        (batch,) = await take(batches, 1)
        assert (batch.sequence, batch.removed, batch.block_count) == (4, (A,), 2)


async def test_a_follower_that_has_everything_waits_for_the_next_batch(feed: EventFeed) -> None:
    published(feed, A)
    async with contextlib.aclosing(following(feed, str(EPOCH), 2)) as batches:
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        published(feed, B)
        assert (await waiting).stored == (B,)


@pytest.mark.parametrize(("epoch", "start"), [("", 0), ("3.4", 2), (str(EPOCH), 9), (str(EPOCH), 0)])
async def test_whoever_cannot_be_continued_gets_a_snapshot_and_goes_on_from_there(
    feed: EventFeed, epoch: str, start: int
) -> None:
    published(feed, A, B)
    published(feed, C)
    async with contextlib.aclosing(following(feed, epoch, start)) as batches:
        (whole,) = await take(batches, 1)
        assert whole.snapshot
        assert set(whole.stored) == {A, B, C}
        assert whole.sequence == 2
        published(feed)
        (batch,) = await take(batches, 1)
        assert (batch.sequence, batch.snapshot) == (3, False)


async def test_a_follower_that_has_fallen_behind_the_log_gets_a_snapshot(feed: EventFeed) -> None:
    published(feed, A)
    async with contextlib.aclosing(following(feed, str(EPOCH), 1)) as batches:
        await take(batches, 1)
        for _ in range(RING_BATCHES + 1):
            feed.publish()
        (batch,) = await take(batches, 1)
        assert batch.snapshot
        assert batch.sequence == RING_BATCHES + 2


async def test_batches_published_while_a_follower_is_busy_are_not_lost(feed: EventFeed) -> None:
    published(feed, A)
    async with contextlib.aclosing(following(feed, str(EPOCH), 1)) as batches:
        await take(batches, 1)
        published(feed, B)
        published(feed, C)
        assert [batch.sequence for batch in await take(batches, 2)] == [2, 3]


async def test_silence_is_broken_by_heartbeats_and_only_silence(feed: EventFeed) -> None:
    beating = asyncio.create_task(feed.beat())
    await eventually(lambda: feed.log.sequence >= 3)
    beating.cancel()
    assert all(not batch.stored and not batch.removed for batch in feed.log.since(1) or ())


async def test_nothing_is_published_where_nothing_changed(feed: EventFeed) -> None:
    feed.publish_changes()
    assert feed.log.sequence == 0
    feed.log.stored(A)
    feed.publish_changes()
    assert feed.log.sequence == 1


async def test_a_subscriber_over_rpc_can_prove_that_it_knows_the_workers_blocks() -> None:
    prompt = prompt_of(150)
    async with prefill() as source, decode(pages=12, patience=OFTEN) as worker, router_to(worker) as router:
        channel = PeerChannel(worker.info.address, TOKEN)
        request = control_pb2.SubscribeKvEventsRequest(start_sequence=0)
        call = control_pb2_grpc.ControlStub(channel.channel).SubscribeKvEvents(request, metadata=channel.metadata)
        batch = await call.read()
        assert batch.snapshot
        assert batch.epoch == worker.info.epoch
        known: set[bytes] = set(hashes_from_bytes(batch.stored))
        for seed in range(4):  # more blocks than there are pages: some are removed
            await router.answer(prompt_of(120, seed=seed), 3, request_id=str(seed), source=source)
        await router.answer(prompt, 3, source=source)
        removed, sequence = 0, batch.sequence
        while not set(block_hashes_of(prompt, 16)) <= known:
            batch = await call.read()
            assert batch.sequence == sequence + 1
            assert batch.published_s > 0
            sequence = batch.sequence
            gone = set(hashes_from_bytes(batch.removed))
            removed += len(gone)
            known = (set() if batch.cleared else known - gone) | set(hashes_from_bytes(batch.stored))
            assert len(known) == batch.block_count
            assert _xor(known) == batch.digest
            assert batch.load.pages_total == 12
            assert batch.load.max_waiting == worker.host.config.schedule.max_waiting
        assert removed > 0
        call.cancel()
        await channel.close()


async def test_a_worker_told_to_forget_says_so_in_one_word() -> None:
    async with decode(patience=SELDOM) as worker, router_to(worker) as router:
        channel = PeerChannel(worker.info.address, TOKEN)
        control = control_pb2_grpc.ControlStub(channel.channel)
        await router.answer(prompt_of(100), 3)
        await worker.idle()
        request = control_pb2.SubscribeKvEventsRequest()
        call = control.SubscribeKvEvents(request, metadata=channel.metadata)
        before = await call.read()
        while not before.block_count:
            before = await call.read()
        answer = await control.ForgetCached(control_pb2.ForgetCachedRequest(), metadata=channel.metadata)
        assert answer.blocks == before.block_count
        batch = await call.read()
        assert (batch.cleared, batch.snapshot, batch.stored, batch.removed) == (True, False, b"", b"")
        assert (batch.sequence, batch.block_count, batch.digest) == (before.sequence + 1, 0, bytes(16))
        call.cancel()
        await channel.close()


def _xor(hashes: set[bytes]) -> bytes:
    total = 0
    for name in hashes:
        total ^= int.from_bytes(name, "big")
    return total.to_bytes(16, "big")
