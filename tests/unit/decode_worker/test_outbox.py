"""Tokens on their way to one router: order, attaching again, the grace of a broken stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from decode_worker.answer import Answer
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


Abandoned = asyncio.Queue[list[Answer]]


@pytest.fixture
def abandoned() -> Abandoned:
    return asyncio.Queue()


@pytest.fixture
async def outbox(abandoned: Abandoned) -> AsyncGenerator[Outbox, None]:
    outbox = Outbox(0.05, 60.0, abandoned.put_nowait)
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


async def test_a_newer_stream_ends_the_older_one(outbox: Outbox, abandoned: Abandoned) -> None:
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
    assert await asyncio.wait_for(abandoned.get(), 5) == [parked], "the others are the newer stream's"
    assert outbox.is_connected


async def test_a_router_that_does_not_come_back_is_given_up_after_the_grace(
    outbox: Outbox, abandoned: Abandoned
) -> None:
    stream = await connected(outbox)
    answer = an_answer()
    outbox.carry(answer, 0)
    await asyncio.sleep(0.1)
    assert abandoned.empty()
    await stream.aclose()
    assert abandoned.empty()
    assert await asyncio.wait_for(abandoned.get(), 5) == [answer]
    assert not outbox.is_connected


async def test_a_router_that_never_came_is_given_up_too(outbox: Outbox, abandoned: Abandoned) -> None:
    answer = an_answer()
    outbox.carry(answer, 0)
    assert await asyncio.wait_for(abandoned.get(), 5) == [answer]


async def test_a_router_that_comes_back_keeps_what_it_attaches_and_no_more(
    outbox: Outbox, abandoned: Abandoned
) -> None:
    wanted, forgotten = an_answer("wanted"), an_answer("forgotten")
    stream = await connected(outbox)
    outbox.carry(wanted, 0)
    outbox.carry(forgotten, 0)
    await stream.aclose()
    stream = await connected(outbox)
    outbox.carry(wanted, 0)
    assert await asyncio.wait_for(abandoned.get(), 5) == [forgotten]
    await stream.aclose()


async def test_a_new_stream_within_the_grace_with_nothing_parked_ends_the_grace(
    outbox: Outbox, abandoned: Abandoned
) -> None:
    await (await connected(outbox)).aclose()
    stream = await connected(outbox)
    await asyncio.sleep(0.1)
    await stream.aclose()
    assert abandoned.empty()


async def test_a_stream_without_news_says_that_it_lives(abandoned: Abandoned) -> None:
    outbox = Outbox(60.0, 0.02, abandoned.put_nowait)
    stream, answer = await connected(outbox), an_answer()
    assert [told(await anext(stream)) for _ in range(3)] == [[], [], []]
    outbox.carry(answer, 0)
    grow(answer, 7)
    outbox.tell(answer)
    async for batch in stream:
        if batch.entries:
            break
    assert told(batch) == [("r", 0, [7])]
    await stream.aclose()
    outbox.close()
