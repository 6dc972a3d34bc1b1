"""What refused requests would have met, and how evenly tenants are served."""

from __future__ import annotations

import pytest

from router.admission.measures import MOST_FOLLOWED, PERIOD_S, Fairness, FalseRejections, jain_index
from router.fleet.worker import Worker
from twostroke.base.ids import Epoch, RequestId, WorkerId
from twostroke.config import Role
from twostroke.rpc.v1.control_pb2 import WORKER_STATE_SERVING, Load

P0, A, B = WorkerId("p0"), RequestId("a"), RequestId("b")


def refused_behind(*ahead: RequestId, latest_start_s: float = 5.0) -> FalseRejections:
    rejections = FalseRejections()
    rejections.add(P0, latest_start_s, ahead, 0.0)
    return rejections


def test_a_refusal_was_false_if_the_last_one_ahead_was_done_in_time():
    rejections = refused_behind(A, B)
    rejections.gone(A, 1.0)
    assert rejections.count == 0
    rejections.gone(B, 4.9)
    assert (rejections.count, rejections.followed) == (1, 1)


def test_a_refusal_was_right_if_one_ahead_took_too_long():
    rejections = refused_behind(A, B)
    rejections.gone(A, 1.0)
    rejections.gone(B, 5.1)
    assert (rejections.count, len(rejections)) == (0, 0)


def test_one_behind_others_work_waits_for_the_worker_to_say_that_it_is_idle():
    rejections = refused_behind()
    rejections.gone(A, 1.0)
    worker = Worker(P0, Role.PREFILL, "", Epoch(1, 2), WORKER_STATE_SERVING, load=Load(queued_s=0.5))
    rejections.look({P0: worker}, 1.5)
    assert rejections.count == 0
    worker.load = Load()
    for now_s in (2.0, 2.5):
        rejections.look({P0: worker}, now_s)
        assert rejections.count == 1


def test_refusals_are_forgotten_when_their_time_is_over_and_never_too_many():
    rejections = FalseRejections()
    for number in range(MOST_FOLLOWED + 10):
        rejections.add(P0, 5.0, (A, RequestId(str(number))), 0.0)
    assert (len(rejections), rejections.followed) == (MOST_FOLLOWED, MOST_FOLLOWED)
    rejections.gone(RequestId("unknown"), 5.1)
    assert len(rejections) == 0
    rejections.gone(A, 5.2)
    assert rejections.count == 0


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
    assert fairness.index({}, 2.0 + PERIOD_S) == 1.0
