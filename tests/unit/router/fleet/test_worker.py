"""What a member of the fleet is known by: its last report, and how busy it has been."""

from __future__ import annotations

from random import Random

import pytest

from router.fleet.worker import UTILISATION_AVERAGE_S, LinkRate, Worker
from twostroke.base.ids import Epoch, WorkerId
from twostroke.config import Role
from twostroke.rpc.v1 import control_pb2
from twostroke.scheduler.cost import StepCost


def new_worker() -> Worker:
    epoch = Epoch.begin(1)
    return Worker(WorkerId("prefill-0"), Role.PREFILL, "host:1", epoch, control_pb2.WORKER_STATE_SERVING)


def after(shares: list[float], report_s: float = 0.25) -> Worker:
    """Reports every now and then, told that so much of the time between two went to prompts."""
    worker, now_s, busy_s, random = new_worker(), 100.0, 0.0, Random(1)
    worker.report(control_pb2.Load(), now_s)
    for share in shares:
        elapsed_s = random.uniform(0, 2 * report_s)
        now_s, busy_s = now_s + elapsed_s, busy_s + share * elapsed_s
        worker.report(control_pb2.Load(prefill_busy_s=busy_s), now_s)
    return worker


@pytest.mark.parametrize("share", [0.0, 0.3, 0.87, 1.0])
def test_utilisation_is_the_share_of_time_that_went_to_prompts(share: float) -> None:
    assert after([share] * 2000).utilisation == pytest.approx(share, abs=0.01)


def test_utilisation_does_not_depend_on_how_often_a_worker_reports() -> None:
    often, seldom = after([0.5] * 2000, 0.1), after([0.5] * 20, 10.0)
    assert often.utilisation == pytest.approx(0.5, abs=0.03)
    assert seldom.utilisation == pytest.approx(0.5, abs=0.03)


def test_a_minute_later_most_is_forgotten() -> None:
    reports = round(UTILISATION_AVERAGE_S / 0.25)
    assert after([1.0] * 2000 + [0.0] * reports).utilisation == pytest.approx(0.37, abs=0.05)


def test_seconds_told_in_the_same_instant_count_in_full() -> None:
    worker = new_worker()
    worker.report(control_pb2.Load(), 0.0)
    worker.report(control_pb2.Load(prefill_busy_s=6.0), 0.0)
    assert worker.utilisation == pytest.approx(6.0 / UTILISATION_AVERAGE_S)
    worker.report(control_pb2.Load(prefill_busy_s=600.0), 0.0)
    assert worker.utilisation == 1.0


def test_costs_and_links_are_what_the_last_report_says() -> None:
    worker = new_worker()
    assert worker.cost == StepCost()
    link = control_pb2.LinkRate(worker_id="decode-0", latency_s=0.5, bytes_per_s=7.0)
    costs = control_pb2.StepCosts(
        step_s=1, stream_s=2, context_token_s=3, prompt_step_s=4, prompt_token_s=5, prompt_pair_s=6
    )
    worker.report(control_pb2.Load(costs=costs, links=[link], queued_s=3.0), 10.0)
    assert worker.cost == StepCost(1, 2, 3, prompt_step_s=4, prompt_token_s=5, prompt_pair_s=6)
    assert worker.links == {WorkerId("decode-0"): LinkRate(0.5, 7.0)}
    assert (worker.queue_s(11.0), worker.queue_s(20.0)) == (2.0, 0.0)


def test_a_worker_that_drafts_is_known_by_what_its_steps_run_and_make_known() -> None:
    worker = new_worker()
    costs = control_pb2.StepCosts(step_s=1, stream_s=2, context_token_s=3, prompt_token_s=5)
    each = control_pb2.StreamStep(rows=1.5, tokens=1.25, before_s=0.5)
    worker.report(control_pb2.Load(costs=costs, stream_step=each), 10.0)
    assert worker.cost == StepCost(1.5, 3, 3, prompt_token_s=5)
    assert worker.step_tokens_each == 1.25


def test_a_worker_that_says_nothing_of_drafts_makes_one_token_of_each_stream_known() -> None:
    worker = new_worker()
    worker.report(control_pb2.Load(costs=control_pb2.StepCosts(step_s=1, stream_s=2)), 10.0)
    assert worker.cost == StepCost(1, 2)
    assert worker.step_tokens_each == 1.0
