"""The automaton finds what a search for every stop string finds, and its work does not grow with them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stop_strings import StopNode, StopScanner, StopStrings


class SlowScanner:
    """The oracle: searches for every stop string in all text that is held back, at every token."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def feed(self, new: str) -> tuple[str, bool]:
        text = self._held + new
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._held = ""
            return text[: end if self._include_stop else start], True
        held_chars = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held_chars :]
        return text[: len(text) - held_chars], False

    def flush(self) -> str:
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, `stop` itself excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


SCRIPTS = st.sampled_from(["ab", "abc", "aé猫🙂"])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Stop strings and the parts of a text of the same few characters, so that they nearly match all the time."""
    alphabet = draw(SCRIPTS)
    stops = draw(st.lists(st.text(alphabet, min_size=1, max_size=12), max_size=16))
    begun = [stop[:-1] for stop in stops] or [""]
    pieces = st.one_of(st.text(alphabet, max_size=6), st.sampled_from(begun))
    return stops, draw(st.lists(pieces, max_size=30))


@settings(max_examples=500, deadline=None)
@given(cases(), st.booleans())
def test_every_part_of_a_text_is_answered_as_a_search_for_each_stop_string_would(
    case: tuple[list[str], list[str]], include_stop: bool
) -> None:
    stops, parts = case
    shared = StopStrings(stops)
    for _ in range(2):  # as the choices of one request: the second finds nodes that the first has made
        fast, slow = StopScanner(shared, include_stop=include_stop), SlowScanner(stops, include_stop=include_stop)
        for part in parts:
            assert (fast.feed(part), fast.is_stopped) == slow.feed(part)
            if fast.is_stopped:
                break
        assert fast.flush() == slow.flush()


LONGEST = pytest.mark.parametrize(
    "stops",
    [
        ["a" * 1023 + chr(0x100 + rank) for rank in range(16)],
        [("ab" * 512)[rank:] + chr(0x100 + rank) for rank in range(16)],
        [chr(0x100 + rank) * 1024 for rank in range(16)],
    ],
    ids=["one beginning", "ends of one another", "nothing in common"],
)


@LONGEST
def test_no_character_makes_more_nodes_than_there_are_strings(stops: list[str]) -> None:
    """Made at once, they would hold up all streams."""
    counting = Counting(stops)
    node, before = counting.root, 0
    for char in _nearly(stops):
        node = counting.after(node, char)
        assert counting.made - before <= len(stops)
        before = counting.made


class Counting(StopStrings):
    made = 0

    def _grow(self, node: StopNode, char: str, first: int, last: int) -> StopNode:
        self.made += 1
        return super()._grow(node, char, first, last)


@LONGEST
def test_a_token_costs_about_the_same_with_the_longest_stop_strings_as_with_one_short_one(stops: list[str]) -> None:
    """A search for each, as it was, took a thousand times as long."""
    longest, short = (min(_per_token_s(each) for _ in range(3)) for each in (stops, ["a" * 3 + "b"]))
    assert longest < 40 * short


def _per_token_s(stops: list[str]) -> float:
    text = _nearly(stops)
    parts = [text[at : at + 4] for at in range(0, len(text), 4)]
    shared, took_s = StopStrings(stops), []
    for _ in range(2):  # the first choice of a request makes the nodes
        scanner, began_s = StopScanner(shared, include_stop=False), time.thread_time()
        for part in parts:
            scanner.feed(part)
            assert not scanner.is_stopped
        took_s.append((time.thread_time() - began_s) / len(parts))
    return min(took_s)


def _nearly(stops: list[str]) -> str:
    """Text that is nearly one of them all the time."""
    once = stops[0][:-1] + stops[-1][:-1]
    return once * (4000 // len(once))
