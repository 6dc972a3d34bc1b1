"""Entries in any order and any overlap become one stream without gap or duplicate."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.worker_link import TokenStream
from twostroke.errors import PeerLost, TransferFailed
from twostroke.ids import RequestId
from twostroke.request import FinishReason
from twostroke.rpc.v1.worker_pb2 import ErrorInfo, Token, TokenEntry


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
    seen: list[int] = []
    while True:
        arrival = await stream.next()
        seen += [sampled.token for sampled in arrival.tokens]
        if arrival.finish is not None:
            break
    assert arrival.finish is FinishReason.STOP
    assert seen == [7 * position for position in range(first, end)]


async def test_what_has_arrived_is_read_before_the_error_that_ended_the_stream() -> None:
    stream = TokenStream(None, RequestId("r#0"), 0, 0)
    stream.feed(entry(0, 2))
    stream.feed(TokenEntry(finish_reason="error", error=ErrorInfo(kind="TransferFailed", message="digest")))
    stream.fail(PeerLost("later"))
    assert len((await stream.next()).tokens) == 2
    with pytest.raises(TransferFailed, match="digest"):
        await stream.next()
    assert stream.is_complete


async def test_nothing_is_taken_after_the_end() -> None:
    stream = TokenStream(None, RequestId("r#0"), 0, 0)
    stream.feed(entry(0, 1, "length"))
    assert stream.feed(entry(5, 1))
    assert (await stream.next()).finish is FinishReason.LENGTH
    assert stream.next_position == 1
