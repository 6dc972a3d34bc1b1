from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from decode_worker.outbox import Outbox
from tests.unit.decode_worker.answers import an_answer, grow
from twostroke.request import FinishReason
from twostroke.rpc.v1.worker_pb2 import TokenBatch


def told(batch: TokenBatch) -> list[tuple[str, int, list[int]]]:
    return [(entry.request_id, entry.position, [token.id for token in entry.tokens]) for entry in batch.entries]


async def connected(outbox: Outbox) -> AsyncGenerator[TokenBatch, None]:
    stream = outbox.stream()
    assert not (await anext(stream)).entries, "the greeting says nothing"
    return stream


@pytest.fixture
def abandoned() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def outbox(abandoned: asyncio.Event) -> AsyncGenerator[Outbox, None]:
    outbox = Outbox(0.05, abandoned.set)
    yield outbox
    outbox.close()


async def test_all_news_of_a_step_come_as_one_batch_in_order(outbox: Outbox) -> None:
    stream = await connected(outbox)
    one, two = an_answer("one"), an_answer("two")
    outbox.carry(one, 0)
    outbox.carry(two, 0)
    for token in (7, 8):
        for answer in (two, one):
            grow(answer, token)
            outbox.tell(answer)
        assert told(await anext(stream)) == [("two", token - 7, [token]), ("one", token - 7, [token])]


async def test_a_slow_reader_finds_several_steps_in_one_entry(outbox: Outbox) -> None:
    stream = await connected(outbox)
    answer = an_answer()
    outbox.carry(answer, 0)
    for token in (7, 8, 9):
        grow(answer, token)
        outbox.tell(answer)
    assert told(await anext(stream)) == [("r", 0, [7, 8, 9])]


async def test_what_was_told_before_the_first_stream_is_not_lost(outbox: Outbox) -> None:
    answer = an_answer(emitted=3)
    outbox.carry(answer, 3)
    grow(answer, 7, 8)
    outbox.tell(answer)
    assert told(await anext(await connected(outbox))) == [("r", 3, [7, 8])]


async def test_a_broken_stream_parks_its_answers_until_they_are_carried_again(outbox: Outbox) -> None:
    answer = an_answer()
    outbox.carry(answer, 0)
    grow(answer, 7)
    stream = await connected(outbox)
    outbox.tell(answer)
    await anext(stream)
    await stream.aclose()
    grow(answer, 8)
    outbox.tell(answer)
    stream = await connected(outbox)
    pending = asyncio.ensure_future(anext(stream))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(pending), 0.02)
    grow(answer, 9, finish=FinishReason.STOP)
    outbox.tell(answer)
    outbox.carry(answer, 1)
    batch = await pending
    assert told(batch) == [("r", 1, [8, 9])]
    assert batch.entries[0].finish_reason == "stop"


async def test_carrying_again_replaces_what_was_still_to_be_sent(outbox: Outbox) -> None:
    stream = await connected(outbox)
    answer = an_answer()
    outbox.carry(answer, 0)
    grow(answer, 7, 8)
    outbox.tell(answer)
    outbox.carry(answer, 1)
    grow(answer, 9)
    outbox.tell(answer)
    assert told(await anext(stream)) == [("r", 1, [8, 9])]


async def test_a_dropped_answer_is_never_heard_of_again(outbox: Outbox) -> None:
    stream = await connected(outbox)
    gone, kept = an_answer("gone"), an_answer("kept")
    for answer in (gone, kept):
        outbox.carry(answer, 0)
        grow(answer, 7)
        outbox.tell(answer)
    outbox.drop(gone)
    outbox.tell(gone)
    assert told(await anext(stream)) == [("kept", 0, [7])]


async def test_a_newer_stream_ends_the_older_one(outbox: Outbox, abandoned: asyncio.Event) -> None:
    older = await connected(outbox)
    parked, fresh = an_answer("parked"), an_answer("fresh")
    outbox.carry(parked, 0)
    waiting = asyncio.ensure_future(anext(older, None))
    await asyncio.sleep(0)
    newer = await connected(outbox)
    assert await waiting is None, "the older stream has ended"
    outbox.carry(fresh, 0)
    for answer in (parked, fresh):
        grow(answer, 7)
        outbox.tell(answer)
    assert told(await anext(newer)) == [("fresh", 0, [7])]
    await asyncio.sleep(0.1)
    assert not abandoned.is_set(), "the end of the older stream is not the end of the router"


async def test_a_router_that_does_not_come_back_is_given_up_after_the_grace(
    outbox: Outbox, abandoned: asyncio.Event
) -> None:
    stream = await connected(outbox)
    await asyncio.sleep(0.1)
    assert not abandoned.is_set()
    await stream.aclose()
    assert not abandoned.is_set()
    await asyncio.wait_for(abandoned.wait(), 5)


async def test_a_router_that_never_came_is_given_up_too(outbox: Outbox, abandoned: asyncio.Event) -> None:
    assert outbox is not None
    await asyncio.wait_for(abandoned.wait(), 5)


async def test_a_new_stream_within_the_grace_keeps_everything(outbox: Outbox, abandoned: asyncio.Event) -> None:
    await (await connected(outbox)).aclose()
    stream = await connected(outbox)
    await asyncio.sleep(0.1)
    await stream.aclose()
    assert not abandoned.is_set()
