"""Borrowed cores are used where steps are shorter with them, and left alone where they are not."""

from __future__ import annotations

from collections import Counter
from random import Random

from twostroke.engine.cores.borrowing import (
    FIRST_OF_PROMPTS_S,
    FIRST_S,
    HOPELESS,
    HOPELESS_STEPS,
    TRIED_STEPS,
    Borrowing,
    StepKind,
    Trials,
)

DECODE, CHUNK = StepKind(1, 0, 0), StepKind(0, 512, 0)
STEP_S = 0.01
FIRST_STEPS = round(FIRST_S / STEP_S)


def ways(trials: Trials, steps: int, *, factor: float, noise: float = 0.02, kind=DECODE, lent: int = 1) -> Counter:
    """How often it borrowed, where a step with borrowed cores takes `factor` of the time."""
    random, seen = Random(1), Counter()
    for _ in range(steps):
        seen[trials.wanted] += 1
        seconds = STEP_S * (factor if trials.wanted and lent else 1.0) * random.uniform(1 - noise, 1 + noise)
        trials.observe(kind, seconds, lent if trials.wanted else 0)
    return seen


def test_it_begins_on_its_own_cores_and_borrows_soon_where_that_pays() -> None:
    trials = Trials(wanted=False, first_s=FIRST_S)
    first = ways(trials, FIRST_STEPS + TRIED_STEPS, factor=0.6)
    assert abs(first[False] - FIRST_STEPS) <= 1
    assert ways(trials, 4000, factor=0.6)[False] < 0.03 * 4000


def test_it_hardly_ever_tries_where_that_costs() -> None:
    assert ways(Trials(wanted=False, first_s=FIRST_S), 4000, factor=6)[True] <= 8 * TRIED_STEPS


def test_where_it_makes_no_difference_nothing_changes() -> None:
    trials = Trials(wanted=False, first_s=FIRST_S)
    ways(trials, 500, factor=1.0)
    assert not trials.wanted


def test_a_few_long_stalls_outweigh_many_short_steps() -> None:
    trials = Trials(wanted=False, first_s=FIRST_S)
    for turn in range(300):
        stalls = trials.wanted and turn % 4 == 0
        trials.observe(DECODE, 0.1 if stalls else 0.008 if trials.wanted else 0.01, int(trials.wanted))
    assert not trials.wanted


def test_it_changes_its_mind_when_the_machine_does() -> None:
    trials = Trials(wanted=False, first_s=FIRST_S)
    for factor, pays in ((6, False), (0.6, True), (6, False)):
        ways(trials, 1000, factor=factor)
        assert trials.wanted is pays


def test_steps_for_which_no_core_was_to_be_had_say_nothing() -> None:
    trials = Trials(wanted=False, first_s=FIRST_S)
    ways(trials, FIRST_STEPS + 1, factor=1.0)
    assert ways(trials, 500, factor=1.0, lent=0)[False] == 0, "the trial waits until there is something to try"


def test_only_steps_of_one_kind_are_compared() -> None:
    """Chunks are longer than decode steps whatever they run on."""
    trials = Trials(wanted=False, first_s=FIRST_S)
    for turn in range(400):
        kind, seconds = (CHUNK, 0.3) if turn % 7 == 0 else (DECODE, 0.01)
        trials.observe(kind, seconds * (0.6 if trials.wanted else 1.0), 1 if trials.wanted else 0)
    assert trials.wanted


def test_steps_of_many_kinds_are_compared_together() -> None:
    """Drafted tokens make steps of as many rows as are likely to be right just then."""
    trials, random = Trials(wanted=False, first_s=FIRST_S), Random(3)
    for _ in range(600):
        rows = random.randrange(1, 25)
        seconds = 0.01 * rows * (0.7 if trials.wanted else 1.0)
        trials.observe(StepKind(rows, 0, 0), seconds, int(trials.wanted))
    assert trials.wanted


def test_a_trial_without_steps_to_compare_with_does_not_put_off_the_next_one() -> None:
    trials = Trials(wanted=False, first_s=FIRST_S)
    for turn in range(4000):
        is_known = not trials.wanted or turn > 1000  # until then, trials see kinds that are never usual
        kind = DECODE if is_known else StepKind(2 + turn, 0, 0)
        trials.observe(kind, STEP_S * (0.6 if trials.wanted else 1.0), int(trials.wanted))
    assert trials.wanted


def test_a_trial_whose_steps_are_all_longer_than_usual_ends_early() -> None:
    trials = Trials(wanted=False, first_s=FIRST_S)
    seen = ways(trials, FIRST_STEPS + 2 * TRIED_STEPS, factor=(1 + HOPELESS) / 2)
    assert seen[True] == HOPELESS_STEPS


def test_one_step_of_a_trial_that_takes_far_longer_than_usual_ends_it() -> None:
    trials = Trials(wanted=False, first_s=FIRST_S)
    assert ways(trials, FIRST_STEPS + 2 * TRIED_STEPS, factor=1.2 * HOPELESS)[True] == 1


def test_no_more_than_one_of_the_first_prompts_is_computed_without_the_cores_that_help_it() -> None:
    borrowing, without = Borrowing(), 0
    for _ in range(round(2 * FIRST_OF_PROMPTS_S / 0.045)):
        borrows = borrowing.trials_of(CHUNK).wanted
        borrowing.trials_of(CHUNK).observe(CHUNK, 0.045 if borrows else 0.09, int(borrows))
        without += not borrows
    assert without == 1


def test_long_steps_are_tried_as_soon_as_enough_of_them_are_known() -> None:
    trials = Trials(wanted=False, first_s=FIRST_S)
    for _ in range(TRIED_STEPS):
        assert not trials.wanted
        trials.observe(CHUNK, 2 * FIRST_S, 0)
    assert trials.wanted


def test_prompts_and_streams_are_judged_apart() -> None:
    """Two cores compute a prompt in half the time, and read the weights for a stream no faster than one."""
    borrowing = Borrowing()
    assert borrowing.trials_of(CHUNK).wanted, "until it is known, prompts borrow"
    assert not borrowing.trials_of(DECODE).wanted
    for _ in range(400):
        for kind, alone_s, together_s in ((CHUNK, 0.06, 0.04), (DECODE, 0.01, 0.012)):
            borrows = borrowing.trials_of(kind).wanted
            borrowing.trials_of(kind).observe(kind, together_s if borrows else alone_s, int(borrows))
    assert borrowing.prompts.wanted
    assert not borrowing.trials_of(DECODE).wanted


def test_prompts_cease_to_borrow_where_that_makes_them_slower() -> None:
    borrowing = Borrowing()
    for _ in range(100):
        borrows = borrowing.trials_of(CHUNK).wanted
        borrowing.trials_of(CHUNK).observe(CHUNK, 0.09 if borrows else 0.06, int(borrows))
    assert not borrowing.prompts.wanted
