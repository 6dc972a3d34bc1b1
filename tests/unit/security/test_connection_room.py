"""Room for newcomers where all places are taken: who goes is looked for once for many, and never long ago."""

from __future__ import annotations

from twostroke.security.connection_room import LOOK_S, ConnectionRoom


def test_what_was_found_is_forgotten_after_a_while() -> None:
    room = ConnectionRoom[str]()
    assert room.next(2, lambda: ["a", "b"], lambda each: True, 0.0) == "a"
    assert room.next(2, lambda: ["c"], lambda each: True, LOOK_S / 2) == "b"
    assert room.next(2, lambda: ["d", "e"], lambda each: True, LOOK_S / 2) == "d"
    assert room.next(2, lambda: ["f"], lambda each: True, 2 * LOOK_S) == "f", "e was found long ago"


def test_where_few_may_go_they_are_looked_for_once_in_a_while() -> None:
    room, looks = ConnectionRoom[str](), list[float]()
    for turn in range(9):
        now_s = turn * LOOK_S / 4

        def look(now_s: float = now_s) -> list[str]:
            looks.append(now_s)
            return []

        assert room.next(100, look, lambda each: True, now_s) is None
    assert looks == [0.0, LOOK_S, 2 * LOOK_S]


def test_where_none_that_was_found_may_go_any_more_others_are_looked_for() -> None:
    room = ConnectionRoom[str]()
    assert room.next(3, lambda: ["a", "b", "c"], lambda each: True, 0.0) == "a"
    assert room.next(3, lambda: ["d"], lambda each: each == "d", 0.0) == "d"
