"""What frames cost a connection, and what pays for them, on a clock of the test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.grpc_listener import connection_cost as costs
from router.grpc_listener.connection_cost import ConnectionCost
from router.grpc_listener.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    STREAM,
    FrameReader,
    TooManyHeaders,
    goaway,
    header_end,
    last_stream,
)
from tests.trials.chaos.neighbours.wire import PRIORITY, WINDOW, frame

MESSAGE = 60
"""Bytes of a token's message."""


class Played:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.cost = ConnectionCost(0.0)
        self.is_spent = False

    def came(self, kind: int, length: int = 8, flags: int = 0, stream: int = 0) -> None:
        self.cost.credit(self.now_s)
        self.cost.came(length, kind, flags, stream)
        self.is_spent = self.is_spent or self.cost.is_spent

    def sent(self, kind: int, length: int = 8, flags: int = 0, stream: int = 0) -> None:
        self.cost.sent(length, kind, flags, stream)

    def call(self, stream: int) -> None:
        self.came(HEADERS, 200, 0, stream)
        self.came(DATA, 500, END_STREAM, stream)

    def answer(self, stream: int, messages: int = 1) -> None:
        self.sent(HEADERS, 30, 0, stream)
        for _ in range(messages):
            self.sent(DATA, MESSAGE, 0, stream)

    def end(self, stream: int) -> None:
        self.sent(HEADERS, 20, END_STREAM, stream)


def _reset(played: Played, n: int) -> None:
    played.call(2 * n + 1)
    played.came(RST_STREAM, 4, 0, 2 * n + 1)


def _refused(played: Played, n: int) -> None:
    played.call(2 * n + 1)
    played.end(2 * n + 1)


def _paid_by_health(played: Played, n: int) -> None:
    played.call(4 * n + 1)
    played.sent(DATA, 7, 0, 4 * n + 1)
    played.end(4 * n + 1)
    played.call(4 * n + 3)
    played.came(RST_STREAM, 4, 0, 4 * n + 3)


FLOODS: dict[str, Callable[[Played, int], None]] = {
    "pings": lambda played, n: played.came(PING),
    "acknowledged pings that nobody sent": lambda played, n: played.came(PING, 8, ACK),
    "settings": lambda played, n: played.came(SETTINGS, 6),
    "windows": lambda played, n: played.came(WINDOW, 4),
    "priorities": lambda played, n: played.came(PRIORITY, 5, 0, n),
    "unknown frames": lambda played, n: played.came(0xAA, 100),
    "empty data": lambda played, n: played.came(DATA, 0, 0, 1),
    "bytes of data": lambda played, n: played.came(DATA, 1, 0, 1),
    "data of streams that are not open": lambda played, n: played.came(DATA, 5000, 0, 12345),
    "trailers": lambda played, n: played.came(HEADERS, 20, END_STREAM, 0),
    "resets": _reset,
    "refused calls": _refused,
    "resets that questions for health pay": _paid_by_health,
}


@pytest.mark.parametrize("name", FLOODS)
def test_frames_and_calls_that_come_to_nothing_spend_the_credit(name: str) -> None:
    played = Played()
    for number in range(2 * costs.FIRST_CREDIT):
        FLOODS[name](played, number)
    assert played.is_spent


def test_windows_of_one_byte_are_not_paid_by_the_bytes_that_they_let_through() -> None:
    played = Played()
    played.call(1)
    for _ in range(10_000):
        played.came(WINDOW, 4, 0, 1)
        played.sent(DATA, 1, 0, 1)
    assert played.is_spent


def test_header_fields_end_within_their_bytes_and_frames() -> None:
    begin, more, last = frame(HEADERS, 0, 1, bytes(100)), frame(CONTINUATION, 0, 1, bytes(50)), END_HEADERS
    whole = begin + more + frame(CONTINUATION, last, 1, bytes(50))
    assert header_end(b"xx" + whole + b"yy", 2) == 2 + len(whole)
    assert [header_end(whole[:end], 0) for end in (0, 5, 109, 120, len(whole) - 1)] == [None] * 5
    for endless in (
        begin + frame(CONTINUATION, last, 1, b"")[:1] + b"\xff" * 8,
        begin + more * 64,
        begin + more * 2000,
    ):
        with pytest.raises(TooManyHeaders):
            header_end(endless, 0)


def test_a_client_that_measures_and_opens_windows_for_each_token_is_never_cut() -> None:
    played = Played()
    for call in range(20):
        stream = 2 * call + 1
        played.call(stream)
        for _ in range(2000):
            played.answer(stream)
            played.came(PING)
            played.came(WINDOW, 4, 0, stream)
        played.end(stream)
    assert not played.is_spent


def test_pings_as_often_as_grpc_allows_are_never_too_many() -> None:
    played = Played()
    for half_seconds in range(100_000):
        played.now_s = half_seconds / 2
        played.came(PING)
    assert not played.is_spent


def test_a_client_may_give_up_all_its_calls_at_once_when_some_were_answered_before() -> None:
    played = Played()
    for call in range(300):
        played.call(2 * call + 1)
        played.answer(2 * call + 1)
        played.end(2 * call + 1)
    for call in range(300, 4300):
        played.call(2 * call + 1)
    for call in range(300, 4300):
        played.came(RST_STREAM, 4, 0, 2 * call + 1)
    assert not played.is_spent


def test_answers_that_the_client_breaks_off_cost_nothing_more() -> None:
    played = Played()
    for call in range(10_000):
        played.call(2 * call + 1)
        played.answer(2 * call + 1)
        played.came(RST_STREAM, 4, 0, 2 * call + 1)
    assert not played.is_spent


def test_deadlines_of_hundreds_of_calls_and_refusals_of_thousands_are_not_held_back() -> None:
    for calls, is_refused in ((500, False), (2000, True)):
        played = Played()
        for call in range(calls):
            played.call(2 * call + 1)
        played.now_s = costs.LATE_S
        for call in range(calls):
            played.end(2 * call + 1) if is_refused else played.came(RST_STREAM, 4, 0, 2 * call + 1)
        played.came(PING)
        assert not played.is_spent


def test_small_data_costs_the_less_the_larger_it_is() -> None:
    left = []
    for length in (0, 16, 512, 1024, 16_000):
        played = Played()
        played.call(1)
        before = played.cost.credit(0.0)
        played.came(DATA, length, 0, 1)
        left.append(before - played.cost.credit(0.0))
    assert left == [1, 1 - 16 / 1024, 0.5, 0, 0]


def test_what_the_router_asks_for_is_paid_for() -> None:
    played = Played()
    for _ in range(10_000):
        played.sent(PING)
        played.came(PING, 8, ACK)
        played.sent(SETTINGS)
        played.came(SETTINGS, 0, ACK)
    assert not played.is_spent


def test_the_reserved_bit_is_no_part_of_a_stream() -> None:
    assert [head[4] for head in FrameReader().frames(frame(HEADERS, 4, 1 | 1 << 31))] == [1]


def test_frames_are_found_in_whatever_pieces_they_come() -> None:
    said = b"".join(
        (frame(HEADERS, 4, 1, b"x" * 300), frame(PING, 0, 0, b"p" * 8), frame(DATA, 1, 1, b""), goaway(3, 11, b"why"))
    )
    whole = [head[1:] for head in FrameReader().frames(said)]
    assert [kind for _, kind, _, _ in whole] == [HEADERS, PING, DATA, 7]
    for size in (1, 2, 7, 9, 10, 64, 313):
        reader, found, rest, passed = FrameReader(), [], b"", b""
        for at in range(0, len(said), size):
            piece = rest + said[at : at + size]
            found += [head[1:] for head in reader.frames(piece)]
            passed, rest = passed + piece[: reader.whole], piece[reader.whole :]
        assert found == whole
        assert passed == said
        assert reader.is_between_frames


def test_streams_that_the_router_ignores_begin_no_call() -> None:
    """After its GOAWAY it takes up no later stream: such a call would stay open here for ever."""
    cost, piece = ConnectionCost(0.0), goaway(5, 0, b"")
    assert last_stream(piece, 0) == 5
    assert last_stream(piece[:11], 0) == STREAM, "the rest is not here: any may be the last"
    cost.most_stream = last_stream(piece, 0)
    cost.came(10, HEADERS, END_HEADERS, 7)
    assert not cost.has_calls
    cost.came(10, HEADERS, END_HEADERS, 5)
    assert cost.has_calls
