"""What forecasts leave out is learned from what happened."""

from __future__ import annotations

from router.routing.selector import FRESH_S, LEAST, MEMORY, Unforeseen


def observed(values: list[float], *, is_local: bool = False, at_s: float = 0.0) -> Unforeseen:
    unforeseen = Unforeseen()
    for seconds in values:
        unforeseen.observe(seconds, at_s, is_local=is_local)
    return unforeseen


def test_nothing_is_added_before_enough_was_seen() -> None:
    assert Unforeseen().seconds(0.0, is_local=True) == 0.0
    assert observed([5.0] * (LEAST - 1)).seconds(0.0, is_local=False) == 0.0
    assert observed([5.0] * LEAST).seconds(0.0, is_local=False) == 5.0


def test_the_median_counts_and_an_odd_one_out_does_not() -> None:
    unforeseen = observed([0.010, 0.011, 0.009, 30.0, 0.010] * 2)
    assert unforeseen.seconds(0.0, is_local=False) == 0.010
    assert unforeseen.seconds(0.0, is_local=True) == 0.0


def test_many_answers_later_the_old_ones_are_forgotten() -> None:
    assert observed([0.5] * 1000 + [0.1] * MEMORY, is_local=True).seconds(0.0, is_local=True) == 0.1


def test_a_bad_minute_is_forgotten_even_if_nothing_comes_after_it() -> None:
    unforeseen = observed([9.0] * MEMORY, at_s=100.0)
    assert unforeseen.seconds(100.0 + FRESH_S, is_local=False) == 9.0
    assert unforeseen.seconds(100.1 + FRESH_S, is_local=False) == 0.0


def test_forecasts_that_are_too_high_are_not_cut() -> None:
    assert observed([-1.0] * LEAST).seconds(0.0, is_local=False) == 0.0
