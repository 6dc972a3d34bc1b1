"""Virtual time passes in order, and never stands still unnoticed."""

from __future__ import annotations

from functools import partial

import pytest

from tools.simulate.fleet import event_queue as queue
from tools.simulate.fleet.event_queue import EventQueue
from twostroke.base.errors import InternalError


def test_things_happen_in_order_and_equal_times_as_they_were_entered() -> None:
    plan, happened = EventQueue(), list[str]()
    for when_s, what in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        plan.at(when_s, partial(happened.append, what))
    plan.at(3.0, plan.stop)
    plan.at(4.0, partial(happened.append, "never"))
    plan.run()
    assert happened == ["a", "b", "c"]
    assert plan.now_s == 3.0


def test_what_is_cancelled_does_not_happen() -> None:
    plan, happened = EventQueue(), list[str]()
    plan.at(1.0, partial(happened.append, "x")).cancel()
    plan.after(2.0, plan.stop)
    plan.run()
    assert happened == []


def test_a_run_with_nothing_left_to_happen_says_so() -> None:
    plan = EventQueue()
    plan.at(1.0, lambda: None)
    with pytest.raises(InternalError, match=r"stands still at 1.000 s"):
        plan.run()


def test_time_that_does_not_pass_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MOST_AT_ONCE", 100)
    plan = EventQueue()

    def again() -> None:
        plan.after(0.0, again)

    plan.at(1.0, again)
    with pytest.raises(InternalError, match="does not get past"):
        plan.run()
