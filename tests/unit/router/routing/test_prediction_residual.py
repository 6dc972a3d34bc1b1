"""What forecasts leave out is learned from what happened."""

from __future__ import annotations

from router.routing.learned import LEAST_RESIDUALS, RESIDUAL_FRESH_S, RESIDUAL_MEMORY, PredictionResidual


def observed(values: list[float], *, at_s: float = 0.0) -> PredictionResidual:
    residual = PredictionResidual()
    for seconds in values:
        residual.observe(seconds, at_s)
    return residual


def test_nothing_is_added_before_enough_was_seen() -> None:
    assert PredictionResidual().seconds(0.0) == 0.0
    assert observed([5.0] * (LEAST_RESIDUALS - 1)).seconds(0.0) == 0.0
    assert observed([5.0] * LEAST_RESIDUALS).seconds(0.0) == 5.0


def test_the_median_counts_and_an_odd_one_out_does_not() -> None:
    residual = observed([0.010, 0.011, 0.009, 30.0, 0.010] * 2)
    assert residual.seconds(0.0) == 0.010


def test_many_answers_later_the_old_ones_are_forgotten() -> None:
    assert observed([0.5] * 1000 + [0.1] * RESIDUAL_MEMORY).seconds(0.0) == 0.1


def test_a_bad_minute_is_forgotten_even_if_nothing_comes_after_it() -> None:
    residual = observed([9.0] * RESIDUAL_MEMORY, at_s=100.0)
    assert residual.seconds(100.0 + RESIDUAL_FRESH_S) == 9.0
    assert residual.seconds(100.1 + RESIDUAL_FRESH_S) == 0.0


def test_forecasts_that_are_too_high_are_not_cut() -> None:
    assert observed([-1.0] * LEAST_RESIDUALS).seconds(0.0) == 0.0
