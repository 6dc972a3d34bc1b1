"""Tests of who is alive, suspect or dead: every pair of states, every signal, and a listener that was late itself."""

from __future__ import annotations

import itertools

import pytest

from router.fleet.liveness import NEXT, Change, LivenessCause, LivenessTracker, Signal, WakingClock
from router.fleet.worker import Liveness
from twostroke.base.errors import ConfigError
from twostroke.config import PatienceConfig

PATIENCE = PatienceConfig(heartbeat_s=0.5, suspect_after_s=1.0, dead_after_s=2.0)


def heard(now_s: float = 0.0) -> Liveness:
    liveness = LivenessTracker(PATIENCE, now_s)
    liveness.hear(Signal.EVENTS, now_s)
    assert liveness.liveness is Liveness.ALIVE
    return liveness


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Liveness, Liveness)))
def test_only_the_table_s_moves_are_made(before: Liveness, after: Liveness) -> None:
    liveness = LivenessTracker(PATIENCE, 0.0)
    liveness.liveness = before
    if after in NEXT[before]:
        assert liveness._move(after, LivenessCause.HEARD, "").before is before
        assert liveness.liveness is after
    else:
        with pytest.raises(AssertionError):
            liveness._move(after, LivenessCause.HEARD, "")


def test_silence_makes_suspect_first_and_dead_second_and_says_what_was_missing() -> None:
    liveness = heard()
    assert liveness.look(0.99) is None
    assert liveness.look(1.0) == Change(
        Liveness.ALIVE, Liveness.SUSPECT, LivenessCause.SILENCE, "events_silent_s=1.00 refusals=0"
    )
    assert liveness.look(1.99) is None
    assert liveness.look(2.0) == Change(
        Liveness.SUSPECT, Liveness.DEAD, LivenessCause.SILENCE, "events_silent_s=2.00 refusals=0"
    )
    assert liveness.look(99.0) is None


def test_a_worker_that_has_never_been_heard_gets_no_work_and_is_not_dead_either() -> None:
    liveness = LivenessTracker(PATIENCE, 0.0)
    assert (liveness.liveness, liveness.look(99.0)) == (Liveness.SUSPECT, None)


@pytest.mark.parametrize("silent_s", [1.5, 50.0])
def test_any_sign_of_life_takes_suspicion_and_death_back(silent_s: float) -> None:
    liveness = heard()
    liveness.look(silent_s)
    liveness.look(silent_s)
    change = liveness.hear(Signal.EVENTS, silent_s)
    assert change is not None
    assert (change.now, change.cause) == (Liveness.ALIVE, LivenessCause.HEARD)
    assert liveness.look(silent_s + 0.5) is None


def test_tokens_keep_a_worker_from_being_dead_but_not_from_being_suspect() -> None:
    liveness = heard()
    for now_s in range(1, 20):
        liveness.hear(Signal.TOKENS, float(now_s))
        liveness.look(now_s + 0.5)
    assert liveness.liveness is Liveness.SUSPECT
    liveness.look(21.0)
    assert liveness.liveness is Liveness.DEAD


def test_a_worker_that_misses_every_second_heartbeat_is_not_dead() -> None:
    liveness = heard()
    for tick in range(1, 1000):
        liveness.look(tick / 10)
        if tick % 15 == 0:
            liveness.hear(Signal.EVENTS, tick / 10)
        assert liveness.liveness is not Liveness.DEAD


def test_a_broken_stream_makes_suspect_and_refusals_in_a_row_make_dead() -> None:
    liveness = heard()
    liveness.refuse(0.1)
    assert liveness.refuse(0.1) is None, "its event stream flows"
    liveness.hear(Signal.EVENTS, 0.2)
    liveness.break_off(0.3)
    assert (liveness.liveness, liveness.refuse(0.3)) == (Liveness.SUSPECT, None)
    change = liveness.refuse(0.4)
    assert change is not None
    assert (change.now, change.cause) == (Liveness.DEAD, LivenessCause.REFUSED)


def test_a_life_that_another_one_answers_for_is_over() -> None:
    change = heard().replace(0.1)
    assert change is not None
    assert (change.now, change.cause) == (Liveness.DEAD, LivenessCause.REPLACED)


def test_a_listener_that_was_late_blames_nobody() -> None:
    """No tick counts for more than one of the 30 s in which the listener was frozen."""
    clock = WakingClock(0.1, now_s=100.0)
    liveness = heard(clock.awake_s)
    for now_s in (100.1, 100.2, 130.2, 130.3):
        clock.tick(now_s)
        assert liveness.look(clock.awake_s) is None
    assert clock.late_s == pytest.approx(29.9)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"suspect_after_s": 0.5}, "--suspect-after"),
        ({"dead_after_s": 1.0}, "--dead-after"),
        ({"dead_after_s": float("nan")}, "--dead-after"),
        ({"suspect_after_s": -1}, "--suspect-after"),
    ],
)
def test_a_patience_that_cannot_be_meant_is_refused_by_its_flag(limits: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PatienceConfig(**limits)
