"""Bytes that may be written to a disk: pages that were seen once get a small share, and leave room for the others."""

from __future__ import annotations

from twostroke.kv_cache.tiers.byte_budget import FIRST_SIGHT_SHARE, SAVED_S, ByteBudget, WriteBudget

PAGE, PER_S = 10, 100.0
SAVED = int(SAVED_S * PER_S / PAGE)
"""Pages that the whole budget can save up."""


def taken(budget: WriteBudget, now_s: float, *, wanted_again: bool) -> int:
    """Takes pages until one is refused; returns how many there were."""
    return next(count for count in range(10 * SAVED) if not budget.take_page(now_s, wanted_again=wanted_again))


def test_what_was_saved_up_may_come_at_once_and_then_comes_back_evenly() -> None:
    budget = WriteBudget(PER_S, PAGE)
    assert [taken(budget, now_s, wanted_again=True) for now_s in (0.0, 0.0, 1.0, 1.5, 1000.0)] == [
        SAVED,
        0,
        10,
        5,
        SAVED,
    ]


def test_pages_that_were_seen_once_have_a_share_of_their_own() -> None:
    budget = WriteBudget(PER_S, PAGE)
    share = int(FIRST_SIGHT_SHARE * SAVED)
    assert taken(budget, 0.0, wanted_again=False) == share
    assert taken(budget, 2.0, wanted_again=False) == int(FIRST_SIGHT_SHARE * 2 * PER_S / PAGE)
    assert taken(budget, 2.0, wanted_again=True) > SAVED // 2


def test_pages_that_were_seen_once_leave_half_of_what_was_saved() -> None:
    budget = WriteBudget(PER_S, PAGE)
    for _ in range(SAVED // 2):
        assert budget.take_page(0.0, wanted_again=True)
    assert taken(budget, 0.0, wanted_again=False) == 0
    assert taken(budget, 0.0, wanted_again=True) == SAVED // 2


def test_a_page_that_is_refused_takes_of_neither_budget() -> None:
    budget = WriteBudget(PER_S, PAGE)
    for _ in range(SAVED // 2):
        assert budget.take_page(0.0, wanted_again=True)
    for _ in range(SAVED):
        assert not budget.take_page(0.0, wanted_again=False)
    assert taken(budget, 1.0, wanted_again=False) == int(FIRST_SIGHT_SHARE * SAVED)


def test_a_budget_below_one_write_saves_up_for_it() -> None:
    budget = ByteBudget(1.0, 100)
    assert [budget.take(100, now_s) for now_s in (0.0, 50.0, 99.0, 101.0, 102.0)] == [True, False, False, True, False]
