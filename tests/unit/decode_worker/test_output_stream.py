"""Tokens on their way to one router: order, attaching again, the grace of a broken stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from decode_worker.output_stream import OutputStream
from decode_worker.request_state import RequestState
from tests.unit.decode_worker.request_states import an_answer, grow
from tests.unit.worker.token_batches import TokenBatches
from twostroke.request import FinishReason, SampledToken
from twostroke.rpc.v1.worker_pb2 import TokenBatch, TokenEntry

Entries = list[TokenEntry]


def told(entries: Entries) -> list[tuple[str, int, list[int]]]:
    return [(entry.request_id, entry.position, [token.id for token in entry.tokens]) for entry in entries]


async def connected(output_stream: OutputStream) -> AsyncGenerator[Entries, None]:
    stream = entries_of(output_stream.stream())
    assert not await anext(stream), "the greeting says nothing"
    return stream


async def entries_of(stream: AsyncGenerator[TokenBatch, None]) -> AsyncGenerator[Entries, None]:
    batches = TokenBatches()
    async with contextlib.aclosing(stream):
        async for batch in stream:
            yield batches.entries(batch)


Abandoned = asyncio.Queue[list[RequestState]]


@pytest.fixture
def abandoned() -> Abandoned:
    return asyncio.Queue()


@pytest.fixture
async def output_stream(abandoned: Abandoned) -> AsyncGenerator[OutputStream, None]:
    output_stream = OutputStream(0.05, 60.0, abandoned.put_nowait)
    yield output_stream
    output_stream.close()


async def test_all_news_of_a_step_come_as_one_batch_in_order(output_stream: OutputStream) -> None:
    stream = await connected(output_stream)
    one, two = an_answer("one"), an_answer("two")
    output_stream.carry(one, 0)
    output_stream.carry(two, 0)
    for token in (7, 8):
        for answer in (two, one):
            grow(answer, token)
            output_stream.notify(answer)
        assert told(await anext(stream)) == [("two", token - 7, [token]), ("one", token - 7, [token])]


async def test_a_slow_reader_finds_several_steps_in_one_entry(output_stream: OutputStream) -> None:
    stream = await connected(output_stream)
    answer = an_answer()
    output_stream.carry(answer, 0)
    for token in (7, 8, 9):
        grow(answer, token)
        output_stream.notify(answer)
    assert told(await anext(stream)) == [("r", 0, [7, 8, 9])]


async def test_what_was_told_before_the_first_stream_is_not_lost(output_stream: OutputStream) -> None:
    answer = an_answer(emitted=3)
    output_stream.carry(answer, 3)
    grow(answer, 7, 8)
    output_stream.notify(answer)
    assert told(await anext(await connected(output_stream))) == [("r", 3, [7, 8])]


async def test_a_broken_stream_parks_its_answers_until_they_are_carried_again(output_stream: OutputStream) -> None:
    answer = an_answer()
    output_stream.carry(answer, 0)
    grow(answer, 7)
    stream = await connected(output_stream)
    output_stream.notify(answer)
    await anext(stream)
    await stream.aclose()
    grow(answer, 8)
    output_stream.notify(answer)
    stream = await connected(output_stream)
    pending = asyncio.ensure_future(anext(stream))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(pending), 0.02)
    grow(answer, 9, finish=FinishReason.STOP)
    output_stream.notify(answer)
    output_stream.carry(answer, 1)
    batch = await pending
    assert told(batch) == [("r", 1, [8, 9])]
    assert batch[0].finish_reason == "stop"


async def test_carrying_again_replaces_what_was_still_to_be_sent(output_stream: OutputStream) -> None:
    stream = await connected(output_stream)
    answer = an_answer()
    output_stream.carry(answer, 0)
    grow(answer, 7, 8)
    output_stream.notify(answer)
    output_stream.carry(answer, 1)
    grow(answer, 9)
    output_stream.notify(answer)
    assert told(await anext(stream)) == [("r", 1, [8, 9])]


async def test_a_dropped_answer_is_never_heard_of_again(output_stream: OutputStream) -> None:
    stream = await connected(output_stream)
    gone, kept = an_answer("gone"), an_answer("kept")
    for answer in (gone, kept):
        output_stream.carry(answer, 0)
        grow(answer, 7)
        output_stream.notify(answer)
    output_stream.drop(gone)
    output_stream.notify(gone)
    assert told(await anext(stream)) == [("kept", 0, [7])]


async def test_a_newer_stream_ends_the_older_one(output_stream: OutputStream, abandoned: Abandoned) -> None:
    older = await connected(output_stream)
    parked, fresh = an_answer("parked"), an_answer("fresh")
    output_stream.carry(parked, 0)
    waiting = asyncio.ensure_future(anext(older, None))
    await asyncio.sleep(0)
    newer = await connected(output_stream)
    assert await waiting is None, "the older stream has ended"
    output_stream.carry(fresh, 0)
    for answer in (parked, fresh):
        grow(answer, 7)
        output_stream.notify(answer)
    assert told(await anext(newer)) == [("fresh", 0, [7])]
    assert await asyncio.wait_for(abandoned.get(), 60) == [parked], "the others are the newer stream's"
    assert output_stream.is_connected


async def test_a_router_that_does_not_come_back_is_given_up_after_the_grace(
    output_stream: OutputStream, abandoned: Abandoned
) -> None:
    stream = await connected(output_stream)
    answer = an_answer()
    output_stream.carry(answer, 0)
    await asyncio.sleep(0.1)
    assert abandoned.empty()
    await stream.aclose()
    assert abandoned.empty()
    assert await asyncio.wait_for(abandoned.get(), 60) == [answer]
    assert not output_stream.is_connected


async def test_a_router_that_never_came_is_given_up_too(output_stream: OutputStream, abandoned: Abandoned) -> None:
    answer = an_answer()
    output_stream.carry(answer, 0)
    assert await asyncio.wait_for(abandoned.get(), 60) == [answer]


async def test_a_router_that_comes_back_keeps_what_it_attaches_and_no_more(
    output_stream: OutputStream, abandoned: Abandoned
) -> None:
    wanted, forgotten = an_answer("wanted"), an_answer("forgotten")
    stream = await connected(output_stream)
    output_stream.carry(wanted, 0)
    output_stream.carry(forgotten, 0)
    await stream.aclose()
    stream = await connected(output_stream)
    output_stream.carry(wanted, 0)
    assert await asyncio.wait_for(abandoned.get(), 60) == [forgotten]
    await stream.aclose()


async def test_a_new_stream_within_the_grace_with_nothing_parked_ends_the_grace(
    output_stream: OutputStream, abandoned: Abandoned
) -> None:
    await (await connected(output_stream)).aclose()
    stream = await connected(output_stream)
    await asyncio.sleep(0.1)
    await stream.aclose()
    assert abandoned.empty()


async def test_a_stream_without_news_says_that_it_lives(abandoned: Abandoned) -> None:
    output_stream = OutputStream(60.0, 0.02, abandoned.put_nowait)
    stream, answer = await connected(output_stream), an_answer()
    assert [told(await anext(stream)) for _ in range(3)] == [[], [], []]
    output_stream.carry(answer, 0)
    grow(answer, 7)
    output_stream.notify(answer)
    async for batch in stream:
        if batch:
            break
    assert told(batch) == [("r", 0, [7])]
    await stream.aclose()
    output_stream.close()


async def test_a_plain_token_of_a_known_request_takes_three_numbers(output_stream: OutputStream) -> None:
    stream = output_stream.stream()
    await anext(stream)
    plain, detailed = an_answer("plain"), an_answer("detailed")
    for answer in (plain, detailed):
        output_stream.carry(answer, 0)
        grow(answer, 7)
        output_stream.notify(answer)
    first = await anext(stream)
    numbers = {entry.request_id: entry.number for entry in first.entries}
    assert 0 not in numbers.values()
    grow(plain, 8)
    detailed.tokens.append(SampledToken(8, -0.5))
    output_stream.notify(plain)
    output_stream.notify(detailed)
    second = await anext(stream)
    assert (list(second.numbers), list(second.positions), list(second.tokens)) == ([numbers["plain"]], [1], [8])
    assert [(entry.request_id, entry.tokens[0].logprob) for entry in second.entries] == [("detailed", -0.5)]
    await stream.aclose()


async def test_a_new_connection_is_told_names_again(output_stream: OutputStream) -> None:
    answer = an_answer()
    for position in (0, 1):
        stream = await connected(output_stream)
        output_stream.carry(answer, position)
        grow(answer, 7)
        output_stream.notify(answer)
        assert told(await anext(stream)) == [("r", position, [7])]
        await stream.aclose()
