"""What refused requests would have met, and how evenly tenants are served."""

from __future__ import annotations

import pytest

from router.admission.fairness import WINDOW_S, Fairness, jain_index
from router.admission.false_rejections import MOST_GHOSTS, Ghosts
from twostroke.ids import RequestId, WorkerId

P0, A, B = WorkerId("p0"), RequestId("a"), RequestId("b")


def ghosts_behind(*ahead: RequestId, latest_start_s: float = 5.0) -> Ghosts:
    ghosts = Ghosts()
    ghosts.add(P0, latest_start_s, ahead, 0.0)
    return ghosts


def test_a_refusal_was_false_if_the_last_one_ahead_was_done_in_time():
    ghosts = ghosts_behind(A, B)
    ghosts.gone(A, 1.0)
    assert ghosts.false_refusals == 0
    ghosts.gone(B, 4.9)
    assert (ghosts.false_refusals, ghosts.followed) == (1, 1)


def test_a_refusal_was_right_if_one_ahead_took_too_long():
    ghosts = ghosts_behind(A, B)
    ghosts.gone(A, 1.0)
    ghosts.gone(B, 5.1)
    assert (ghosts.false_refusals, len(ghosts)) == (0, 0)


def test_a_ghost_behind_others_work_waits_for_the_worker_to_say_that_it_is_idle():
    ghosts = ghosts_behind()
    ghosts.gone(A, 1.0)
    assert list(ghosts.workers) == [P0]
    ghosts.drained(P0, 2.0)
    assert (ghosts.false_refusals, list(ghosts.workers)) == (1, [])


def test_ghosts_are_forgotten_when_their_time_is_over_and_never_too_many():
    ghosts = Ghosts()
    for number in range(MOST_GHOSTS + 10):
        ghosts.add(P0, 5.0, (A, RequestId(str(number))), 0.0)
    assert (len(ghosts), ghosts.followed) == (MOST_GHOSTS, MOST_GHOSTS)
    ghosts.gone(RequestId("unknown"), 5.1)
    assert len(ghosts) == 0
    ghosts.gone(A, 5.2)
    assert ghosts.false_refusals == 0


def test_jains_index_is_one_for_equals_and_one_over_n_where_one_has_all():
    assert jain_index([0.3, 0.3, 0.3]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([]) == 1.0


def test_a_tenant_that_waits_or_was_refused_lowers_the_index_until_the_window_has_passed():
    fairness = Fairness()
    fairness.served("a", 10.0, 0.0)
    assert fairness.index({}, 1.0) == pytest.approx(1.0)
    assert fairness.index({"b": 5.0}, 1.0) == pytest.approx(0.5)
    fairness.refused("b", 5.0, 1.0)
    assert fairness.index({}, 2.0) == pytest.approx(0.5)
    assert fairness.index({}, 2.0 + WINDOW_S) == 1.0
