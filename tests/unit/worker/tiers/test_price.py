"""When a load is begun, and when it is given up."""

from __future__ import annotations

import pytest

from twostroke.worker.measured.page_time import OUTLIER, PageTime, ReadTimes
from twostroke.worker.tiers.price import (
    LEAST_SHARED_S,
    MOST_UNLIKE,
    ReadQueue,
    blocks_to_compute,
    is_late,
    pays,
    pays_in_part,
    predicted_read_s,
    queued_blocks,
    thread_for,
)


def test_the_estimate_follows_what_loads_take_and_one_outlier_moves_it_little() -> None:
    time = PageTime(0.0).after(0.1, 10)
    assert time.seconds == pytest.approx(0.01)
    assert time.after(10.0, 1).seconds <= 0.01 * (1 + OUTLIER / 8)
    assert time.after(1.0, 1000).seconds == pytest.approx(0.01 + (0.001 - 0.01), rel=0.01)
    assert time.after(0.0, 0) == time
    assert time.at_least(0.5).seconds == 0.5
    assert time.at_least(0.001) == time


@pytest.mark.parametrize("slowdown", [1.0, 1.4, 2.0])
def test_what_sharing_costs_is_learned_and_leaves_the_time_of_one_thread_as_it_is(slowdown: float) -> None:
    time = PageTime(0.01).after_reads(ReadTimes(beside_pages=1000, beside_s=1000 * 0.01 * slowdown))
    assert time.seconds == pytest.approx(0.01)
    assert time.slowdown == pytest.approx(slowdown)


@pytest.mark.parametrize(("page_s", "seconds", "slowdown"), [(0.08, 0.04, 2.0), (0.001, 0.001, 1.0)])
def test_what_sharing_cannot_explain_tells_of_the_tier(page_s: float, seconds: float, slowdown: float) -> None:
    time = PageTime(0.01).after_reads(ReadTimes(beside_pages=1000, beside_s=1000 * page_s))
    assert time.seconds == pytest.approx(seconds, rel=0.01)
    assert time.slowdown == pytest.approx(slowdown, rel=0.01)


def test_both_kinds_of_reads_are_learned_from() -> None:
    times = ReadTimes().plus(0.02, is_beside=False).plus(0.03, is_beside=True).times(1000)
    time = PageTime(0.01).after_reads(times)
    assert (time.seconds, time.slowdown) == (pytest.approx(0.02), pytest.approx(1.5))


def test_threads_that_share_a_tier_are_not_promised_twice_its_speed() -> None:
    time = PageTime(1.0)
    assert predicted_read_s(time, [ReadQueue(10), ReadQueue()], 1, 10) == 20
    assert predicted_read_s(time, [ReadQueue(3), ReadQueue()], 1, 10) == 13, "three of them are read beside others"
    assert predicted_read_s(time, [ReadQueue(10), ReadQueue(5)], 1, 2) == 14, "with those that wait before them"
    assert predicted_read_s(time, [ReadQueue(0, fetching_s=6.0)], 0, 2) == 7, "the read under way lasts longer"


@pytest.mark.parametrize(
    ("slowdown", "queues", "pages", "thread"),
    [
        (2.0, (0, 0), 5, 0),
        (2.0, (400, 0), 2, 1),  # a short one passes a long one
        (2.0, (2, 400), 4, 0),  # it waits behind another short one
        (2.0, (100, 0), 100, 0),  # both at once would take as long, and delay the first one
        (1.2, (100, 0), 100, 1),  # both at once are worth it
        (1.0, (7, 6), 9, 1),
    ],
)
def test_a_load_gets_the_thread_that_brings_it_soonest_without_a_longer_delay_of_another(
    slowdown: float, queues: tuple[int, int], pages: int, thread: int
) -> None:
    assert thread_for(PageTime(0.001, slowdown), [ReadQueue(each) for each in queues], pages) == thread


def test_no_load_is_given_to_a_thread_whose_read_does_not_end() -> None:
    queues = [ReadQueue(1, fetching_s=60.0), ReadQueue(40)]
    assert thread_for(PageTime(0.001), queues, 40) == 1


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
