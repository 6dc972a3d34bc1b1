"""When a load is begun, and when it is given up."""

from __future__ import annotations

import pytest

from twostroke.worker.tiers.price import (
    LEAST_SHARED_S,
    MOST_UNLIKE,
    OUTLIER,
    PageTime,
    blocks_to_compute,
    is_late,
    pays,
    pays_in_part,
    queued_blocks,
)


def test_the_estimate_follows_what_loads_take_and_one_outlier_moves_it_little() -> None:
    time = PageTime(0.0).after(0.1, 10)
    assert time.seconds == pytest.approx(0.01)
    assert time.after(10.0, 1).seconds <= 0.01 * (1 + OUTLIER / 8)
    assert time.after(1.0, 1000).seconds == pytest.approx(0.01 + (0.001 - 0.01), rel=0.01)
    assert time.after(0.0, 0) == time
    assert time.at_least(0.5).seconds == 0.5
    assert time.at_least(0.001) == time


def test_the_work_of_blocks_grows_with_what_lies_before_them() -> None:
    first, later = queued_blocks([0, 1], 16), queued_blocks([100, 101], 16)
    assert first.tokens == later.tokens == 32
    assert first.pairs == 32 * 16
    assert later.pairs == first.pairs + 32 * 1600


def test_what_takes_longer_than_computing_is_not_begun() -> None:
    assert pays(0.9, 1.0)
    assert not pays(1.0, 1.0)


@pytest.mark.parametrize("load_page_s", [0.2, 0.5, 1.0, 1.7, 5.0])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_computing_from_the_front_and_loading_from_the_end_finish_together(load_page_s: float, count: int) -> None:
    first = blocks_to_compute(count, lambda blocks: blocks * load_page_s, float)
    ends = [max(split, (count - split) * load_page_s) for split in range(count)]
    assert max(first, (count - first) * load_page_s) <= min(ends) + load_page_s + 1
    assert 0 <= first < count


def test_nothing_is_left_to_a_reader_that_is_busy_for_longer_than_computing_takes() -> None:
    assert blocks_to_compute(5, lambda blocks: 10.0 + blocks, float) == 5


def test_a_load_brings_a_part_where_it_is_about_as_fast_as_computing() -> None:
    assert pays_in_part(1.0, 1.0, is_alone=False)
    assert pays_in_part(MOST_UNLIKE, 1.0, is_alone=False)
    assert not pays_in_part(MOST_UNLIKE * 1.01, 1.0, is_alone=True), "it would bring too little"
    assert not pays_in_part(LEAST_SHARED_S * 0.9, LEAST_SHARED_S, is_alone=True), "there is little to gain"
    assert pays_in_part(0.5, 1.0, is_alone=True)
    assert not pays_in_part(0.5, 1.0, is_alone=False), "computing would delay others"
    assert not pays_in_part(0.99 / MOST_UNLIKE, 1.0, is_alone=True), "it brings all soon"


@pytest.mark.parametrize(
    ("elapsed_s", "wait_s", "arrived", "late"),
    [
        (0.09, 0.0, 0, False),  # too early to say
        (0.11, 0.0, 0, True),  # ten pages at this pace take longer than a second
        (0.5, 0.0, 5, False),
        (0.5, 0.0, 3, True),
        (0.4, 0.4, 0, False),  # others were read before it, as predicted
        (0.5, 0.4, 0, True),
    ],
)
def test_a_load_is_given_up_where_computing_would_be_done_sooner(
    elapsed_s: float, wait_s: float, arrived: int, late: bool
) -> None:
    assert is_late(elapsed_s, wait_s, arrived, 10, 1.0) is late
