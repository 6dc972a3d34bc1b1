"""Whom admission refuses, and whom it does not: late ones, those for whom there is no room, and nobody else."""

from __future__ import annotations

import pytest

from router.admission.queued_request import Placement, Reason, Refused, Rules
from tests.unit.router.virtual import TOKEN_S, VirtualFleet, reporting
from twostroke.base.ids import RequestId

OWN_S = 160 * TOKEN_S
SLOW_FIRST = 3200
"""Tokens of a prompt that keeps a worker busy for seconds."""


def test_a_late_first_token_is_refused_at_once_and_says_by_how_much():
    fleet = VirtualFleet(Rules(lone_ahead_s=0.0, slo_ttft_s=2.0))
    for number in range(30):
        fleet.ask(f"r{number}")
    fleet.run(until_s=0.0)
    entered = [name for name in fleet.asked_s if name not in fleet.refused]
    assert 9 <= len(entered) <= 12  # 0.16 s each, within 2 s
    refusals = [refused for _, refused in fleet.refused.values()]
    assert {refused.reason for refused in refusals} == {Reason.SLO}
    assert all(0 < refused.late_s <= OWN_S + 0.01 for refused in refusals)
    assert all(refused.first_token_s == pytest.approx(2.0 + refused.late_s) for refused in refusals)
    fleet.run()
    assert all(fleet.ttft_s(name) <= 2.0 for name in entered)
    assert len(fleet.reservations) == 0


def test_nobody_is_refused_without_a_limit_or_by_workers_that_have_shown_nothing_yet():
    fleet = VirtualFleet()
    for number in range(60):
        fleet.ask(f"r{number}")
    fleet.run()
    assert not fleet.refused
    fresh = VirtualFleet(Rules(lone_ahead_s=0.0, slo_ttft_s=1e-6))
    for worker in fresh.workers.values():
        reporting(worker.fleet_worker, token_s=0.0)
    verdicts = [fresh.admission.enter(fresh.queued(f"r{n}"), fresh.serving, 0.0) for n in range(50)]
    assert all(isinstance(verdict, Placement) for verdict in verdicts)


def test_a_clients_own_deadline_refuses_as_the_operators_does_and_is_named():
    fleet = VirtualFleet(Rules(lone_ahead_s=0.0, slo_ttft_s=50.0))
    fleet.ask("long", tokens=SLOW_FIRST)
    fleet.ask("short", deadline_s=1.0)
    fleet.ask("patient", deadline_s=10.0)
    fleet.run()
    assert fleet.refused["short"][1].reason is Reason.DEADLINE
    assert fleet.refused["short"][1].late_s == pytest.approx(3.2 + OWN_S - 1.0, abs=0.05)
    assert fleet.ttft_s("patient") < 4


@pytest.mark.parametrize(
    ("deadline_s", "most_tokens", "is_refused"),
    [(6.0, 10_000, False), (5.7, 10_000, True), (5.0, 1000, False), (None, 10_000, False)],
)
def test_a_deadline_is_the_whole_answers_so_the_first_token_has_to_come_sooner(deadline_s, most_tokens, is_refused):
    """Others' answers took two thousand steps of a millisecond, and a margin, after their first token: that is due at
    3.36 s."""
    fleet = VirtualFleet(Rules(lone_ahead_s=0.0))
    fleet.admission._selector.ended(2001)
    fleet.ask("long", tokens=SLOW_FIRST)
    fleet.ask("short", deadline_s=deadline_s, most_output_tokens=most_tokens)
    fleet.run()
    assert ("short" in fleet.refused) == is_refused


def test_long_answers_of_others_refuse_nobody_who_leaves_half_of_its_time_to_the_first_token():
    fleet = VirtualFleet(Rules(lone_ahead_s=0.0))
    fleet.admission._selector.ended(100_001)
    fleet.ask("r", deadline_s=0.5, most_output_tokens=1_000_000)
    fleet.run()
    assert not fleet.refused


def test_a_held_one_is_refused_when_it_can_no_longer_make_it():
    fleet = VirtualFleet()
    fleet.true_share = 3.0  # prompts take three times as long as predicted
    for number in range(8):
        fleet.ask(f"r{number}", tokens=480, priority=1)
    fleet.ask("late", deadline_s=5.0)
    fleet.run()
    at_s, refused = fleet.refused["late"]
    assert 1.5 < at_s <= 5.0 - OWN_S + 0.01  # it was predicted to make it, and seen not to before its time was over
    assert refused.reason is Reason.DEADLINE
    assert refused.late_s > 0
    assert len(fleet.first_token_s) == 8


def test_false_refusals_are_those_that_would_have_made_it():
    for true_share, expected in ((0.3, True), (1.0, False)):
        fleet = VirtualFleet(Rules(lone_ahead_s=0.0, slo_ttft_s=3.0))
        fleet.true_share = true_share
        for number in range(30):
            fleet.ask(f"r{number}")
        fleet.run()
        assert fleet.refused
        assert fleet.admission.false_rejections.followed == len(fleet.refused)
        assert (fleet.admission.false_rejections.count == len(fleet.refused)) is expected
        assert expected or fleet.admission.false_rejections.count == 0


def test_a_full_queue_refuses_the_flood_and_not_the_newcomer():
    fleet = VirtualFleet(Rules(lone_ahead_s=0.0, most_queued=50))
    for number in range(100):
        fleet.ask(f"flood{number}", tenant="flood")
    fleet.ask("single", at_s=0.5, tenant="single")
    fleet.run()
    reasons = {name: refused.reason for name, (_, refused) in fleet.refused.items()}
    assert set(reasons.values()) == {Reason.QUEUE_FULL}
    assert "single" not in reasons
    assert fleet.ttft_s("single") < 1.0
    assert len(fleet.first_token_s) + len(reasons) == 101


def test_nobody_makes_room_for_a_newcomer_that_is_refused_itself():
    fleet = VirtualFleet(Rules(lone_ahead_s=0.0, most_queued=5))
    for number in range(20):
        fleet.ask(f"flood{number}", tenant="flood")
    fleet.run(until_s=0.0)
    refused = set(fleet.refused)
    late = fleet.queued("late", tenant="other", deadline_s=0.01)
    assert isinstance(fleet.admission.enter(late, fleet.serving, fleet.now_s), Refused)
    fleet.run()
    assert set(fleet.refused) == refused


def test_one_that_makes_room_is_told_at_once():
    fleet = VirtualFleet(Rules(lone_ahead_s=0.0, most_queued=5))
    for number in range(20):
        fleet.ask(f"flood{number}", tenant="flood")
    fleet.run(until_s=0.0)
    assert fleet.admission.enter(fleet.queued("other", tenant="other"), fleet.serving, 0.0) is None
    assert fleet.admission.wake_at_s == 0.0
    assert [type(verdict) for verdict in fleet.admission.wake(fleet.serving, 0.0)] == [Refused]


def test_limits_of_requests_that_are_gone_are_not_kept():
    fleet = VirtualFleet()
    reporting(fleet.workers["p0"].fleet_worker, 0.0, queued_s=100.0)
    assert fleet.admission.enter(fleet.queued("stays", deadline_s=500.0), fleet.serving, 0.0) is None
    for number in range(1000):
        queued = fleet.queued(f"r{number}", deadline_s=1e6)
        assert fleet.admission.enter(queued, fleet.serving, 0.0) is None
        fleet.admission.leave(queued.request_id, 0.0)
    assert len(fleet.admission._late) < 100


def test_what_is_unforeseen_refuses_nobody():
    fleet = VirtualFleet(Rules(lone_ahead_s=0.0, slo_ttft_s=1.0))
    for number in range(100):
        name = RequestId(f"slow{number}")
        assert isinstance(fleet.admission.enter(fleet.queued(name), fleet.serving, 0.0), Placement)
        fleet.admission.first_token(name, 5.0)
    assert isinstance(fleet.admission.enter(fleet.queued("r"), fleet.serving, 0.0), Placement)


def test_an_idle_worker_that_says_it_is_slow_is_tried_by_one_request():
    fleet = VirtualFleet()
    for name in ("first", "second"):
        fleet.ask(name, deadline_s=0.1)
    fleet.run(until_s=0.05)
    assert fleet.released == ["first"], "its costs may come of a bad moment"
    assert list(fleet.refused) == ["second"], "one trial at a time"


def test_a_worker_that_has_computed_nothing_yet_refuses_nobody():
    fleet = VirtualFleet()
    reporting(fleet.workers["p0"].fleet_worker, 0.0, prefill_busy_s=0.0)
    for number in range(20):
        fleet.ask(f"r{number}", deadline_s=0.1)
    fleet.run(until_s=0.0)
    assert not fleet.refused, "what it says of itself was measured while everything started"
    assert fleet.released == ["r0"], "the others wait to see"
    fleet.run()
    assert fleet.refused, "by what the first prompt took"


def test_costs_that_were_just_confirmed_refuse_on_an_idle_worker_too():
    fleet = VirtualFleet()
    fleet.ask("confirms")
    fleet.run(until_s=1.0)
    fleet.workers["p0"].fleet_worker.prefilled_at_s = fleet.now_s
    fleet.ask("late", at_s=1.5, deadline_s=1.6)
    fleet.run()
    assert list(fleet.refused) == ["late"]
