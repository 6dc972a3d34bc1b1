"""Borrowed cores are used where steps are shorter with them, and left alone where they are not."""

from __future__ import annotations

from collections import Counter
from random import Random

from twostroke.engine.borrowing import FIRST_S, HOPELESS_STEPS, TRIED_STEPS, Borrowing

DECODE, CHUNK = (1, 0, 0), (0, 512, 0)
STEP_S = 0.01
FIRST_STEPS = round(FIRST_S / STEP_S)


def ways(
    borrowing: Borrowing, steps: int, *, factor: float, noise: float = 0.02, kind=DECODE, lent: int = 1
) -> Counter:
    """How often it borrowed, where a step with borrowed cores takes `factor` of the time."""
    random, seen = Random(1), Counter()
    for _ in range(steps):
        seen[borrowing.wanted] += 1
        seconds = STEP_S * (factor if borrowing.wanted and lent else 1.0) * random.uniform(1 - noise, 1 + noise)
        borrowing.observe(kind, seconds, lent if borrowing.wanted else 0)
    return seen


def test_it_begins_on_its_own_cores_and_borrows_soon_where_that_pays() -> None:
    borrowing = Borrowing()
    first = ways(borrowing, FIRST_STEPS + TRIED_STEPS, factor=0.6)
    assert abs(first[False] - FIRST_STEPS) <= 1
    assert ways(borrowing, 4000, factor=0.6)[False] < 0.03 * 4000


def test_it_hardly_ever_tries_where_that_costs() -> None:
    assert ways(Borrowing(), 4000, factor=6)[True] <= 8 * TRIED_STEPS


def test_where_it_makes_no_difference_nothing_changes() -> None:
    borrowing = Borrowing()
    ways(borrowing, 500, factor=1.0)
    assert not borrowing.wanted


def test_a_few_long_stalls_outweigh_many_short_steps() -> None:
    borrowing = Borrowing()
    for turn in range(300):
        stalls = borrowing.wanted and turn % 4 == 0
        borrowing.observe(DECODE, 0.1 if stalls else 0.008 if borrowing.wanted else 0.01, int(borrowing.wanted))
    assert not borrowing.wanted


def test_it_changes_its_mind_when_the_machine_does() -> None:
    borrowing = Borrowing()
    for factor, pays in ((6, False), (0.6, True), (6, False)):
        ways(borrowing, 1000, factor=factor)
        assert borrowing.wanted is pays


def test_steps_for_which_no_core_was_to_be_had_say_nothing() -> None:
    borrowing = Borrowing()
    ways(borrowing, FIRST_STEPS + 1, factor=1.0)
    assert ways(borrowing, 500, factor=1.0, lent=0)[False] == 0, "the trial waits until there is something to try"


def test_only_steps_of_one_kind_are_compared() -> None:
    """Chunks are longer than decode steps whatever they run on."""
    borrowing = Borrowing()
    for turn in range(400):
        kind, seconds = (CHUNK, 0.3) if turn % 7 == 0 else (DECODE, 0.01)
        borrowing.observe(kind, seconds * (0.6 if borrowing.wanted else 1.0), 1 if borrowing.wanted else 0)
    assert borrowing.wanted


def test_a_trial_whose_steps_are_all_longer_than_usual_ends_early() -> None:
    borrowing = Borrowing()
    seen = ways(borrowing, FIRST_STEPS + 2 * TRIED_STEPS, factor=2)
    assert seen[True] == HOPELESS_STEPS


def test_long_steps_are_tried_as_soon_as_enough_of_them_are_known() -> None:
    borrowing = Borrowing()
    for _ in range(TRIED_STEPS):
        assert not borrowing.wanted
        borrowing.observe(CHUNK, 2 * FIRST_S, 0)
    assert borrowing.wanted
