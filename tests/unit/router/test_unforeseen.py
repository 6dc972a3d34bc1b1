"""What forecasts leave out is learned from what happened."""

from __future__ import annotations

from router.unforeseen import MEMORY, Unforeseen


def test_nothing_is_added_before_anything_was_seen() -> None:
    assert Unforeseen().seconds(is_local=True) == 0.0


def test_the_median_counts_and_an_odd_one_out_does_not() -> None:
    unforeseen = Unforeseen()
    for seconds in (0.010, 0.011, 0.009, 30.0, 0.010):
        unforeseen.observe(seconds, is_local=False)
    assert unforeseen.seconds(is_local=False) == 0.010
    assert unforeseen.seconds(is_local=True) == 0.0


def test_what_was_long_ago_is_forgotten() -> None:
    unforeseen = Unforeseen()
    for seconds in [0.5] * 1000 + [0.1] * MEMORY:
        unforeseen.observe(seconds, is_local=True)
    assert unforeseen.seconds(is_local=True) == 0.1


def test_forecasts_that_are_too_high_are_not_cut() -> None:
    unforeseen = Unforeseen()
    unforeseen.observe(-1.0, is_local=False)
    assert unforeseen.seconds(is_local=False) == 0.0
