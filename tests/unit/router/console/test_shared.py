"""What several viewers look at is made once, and takes a bounded share of the router's time."""

from __future__ import annotations

from router.console.fleet_view import PERIOD_S, SHARE, Shared


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made_within(seconds: float, takes_s: float) -> int:
    """Counts how often a value that takes so long is made while somebody looks at it ten times a second."""
    clock, made = Clock(), []

    def make() -> int:
        clock.now_s += takes_s
        made.append(clock.now_s)
        return len(made)

    shared = Shared(make, clock)
    while clock.now_s < seconds:
        assert shared.get() == len(made)
        clock.now_s += 0.1
    return len(made)


def test_a_value_is_made_once_a_second_however_many_look() -> None:
    assert 90 <= made_within(100, takes_s=0.0) <= 100 / PERIOD_S + 1


def test_a_value_that_takes_long_is_made_more_rarely() -> None:
    for takes_s in (0.01, 0.05, 0.5):
        assert made_within(1000, takes_s) * takes_s <= (1000 * SHARE + takes_s) * 1.05
