"""Entries in any order and any overlap become one stream without gap or duplicate."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.token_stream import TokenDelta, TokenStream
from twostroke.base.errors import PeerLost, TransferFailed
from twostroke.base.ids import RequestId
from twostroke.request import FinishReason
from twostroke.rpc.v1.worker_pb2 import ErrorInfo, Token, TokenEntry


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [sampled.token for delta in deltas for sampled in delta.tokens]


def entry(position: int, count: int, finish: str = "") -> TokenEntry:
    return TokenEntry(
        position=position, tokens=[Token(id=7 * p) for p in range(position, position + count)], finish_reason=finish
    )


@given(st.integers(0, 2**32), st.integers(0, 10), st.integers(1, 30))
async def test_whatever_overlaps_or_comes_twice_every_token_is_read_once(seed: int, first: int, length: int) -> None:
    rng = random.Random(seed)
    stream = TokenStream(None, RequestId("r#0"), 0, first)
    end = first + length
    while not stream.is_complete:
        position = rng.randint(first, end)
        count = rng.randint(0, end - position)
        reaches = stream.next_position >= position
        assert stream.feed(entry(position, count, "stop" if position + count == end else "")) is reaches
    seen: list[TokenDelta] = []
    assert await stream.read(seen.append) is FinishReason.STOP
    assert tokens_of(seen) == [7 * position for position in range(first, end)]


async def test_a_plain_token_is_taken_as_an_entry_is() -> None:
    stream = TokenStream(None, RequestId("r#0"), 0, 3)
    assert not stream.feed_token(4, 28), "the one before it is missing"
    assert stream.feed_token(3, 21)
    assert stream.feed_token(3, 21), "it has come already"
    assert stream.feed_token(4, 28)
    seen: list[TokenDelta] = []
    reading = asyncio.ensure_future(stream.read(seen.append))
    await asyncio.sleep(0)
    assert tokens_of(seen) == [21, 28]
    assert stream.feed_token(5, 35)
    assert tokens_of(seen) == [21, 28, 35], "its reader is called at once"
    stream.feed(entry(6, 1, "stop"))
    assert stream.feed_token(9, 63), "nothing is missing after the end"
    assert await reading is FinishReason.STOP
    assert tokens_of(seen) == [21, 28, 35, 42]


async def test_what_has_arrived_is_read_before_the_error_that_ended_the_stream() -> None:
    stream = TokenStream(None, RequestId("r#0"), 0, 0)
    stream.feed(entry(0, 2))
    stream.feed(TokenEntry(finish_reason="error", error=ErrorInfo(kind="TransferFailed", message="digest")))
    stream.fail(PeerLost("later"))
    seen: list[TokenDelta] = []
    with pytest.raises(TransferFailed, match="digest"):
        await stream.read(seen.append)
    assert len(tokens_of(seen)) == 2
    assert stream.is_complete


async def test_nothing_is_taken_after_the_end() -> None:
    stream = TokenStream(None, RequestId("r#0"), 0, 0)
    stream.feed(entry(0, 1, "length"))
    assert stream.feed(entry(5, 1))
    assert await stream.read(lambda _: None) is FinishReason.LENGTH
    assert stream.next_position == 1


async def test_what_its_reader_raises_ends_this_stream_and_nothing_else() -> None:
    stream = TokenStream(None, RequestId("r#0"), 0, 0)

    def fail(_: TokenDelta) -> None:
        raise ValueError("a bug")

    reading = asyncio.ensure_future(stream.read(fail))
    await asyncio.sleep(0)
    assert stream.feed(entry(0, 1))
    with pytest.raises(ValueError, match="a bug"):
        await reading
    assert not stream.is_complete


async def test_a_stream_that_was_read_leaves_no_garbage() -> None:
    stream = TokenStream(None, RequestId("r#0"), 0, 0)
    gone = weakref.ref(stream)
    reading = asyncio.ensure_future(stream.read(lambda _, stream=stream: None))
    await asyncio.sleep(0)
    stream.feed(entry(0, 1, "stop"))
    assert await reading is FinishReason.STOP
    gc.disable()
    try:
        del stream, reading
        assert gone() is None
    finally:
        gc.enable()


async def test_an_error_of_its_reader_is_not_hidden_by_an_end_that_came_before_it_read() -> None:
    stream = TokenStream(None, RequestId("r#0"), 0, 0)
    stream.feed(entry(0, 1))
    stream.feed(entry(1, 1, "stop"))
    seen: list[TokenDelta] = []

    def fail(delta: TokenDelta) -> None:
        seen.append(delta)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await stream.read(fail)
    assert tokens_of(seen) == [0]
