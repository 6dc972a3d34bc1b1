"""Admission around a real selector, in virtual time: workers are queues that take the predicted time, or another."""

from __future__ import annotations

from collections import Counter

import pytest

from router.admission.admission import HEADS, MOST_DECIDED
from router.admission.capacity import MOST_ENDING, MOST_LONE_ENDING, ActiveTenant, ActiveTenants
from router.admission.queued_request import Placement, Refused, Rules, Siblings
from router.routing.policies import policy_named
from router.routing.policies.priced import Priced
from tests.unit.router.calls import calls_of
from tests.unit.router.virtual import REMOTE, TOKEN_S, VirtualFleet, fleet_worker, reporting
from twostroke.base.ids import RequestId
from twostroke.config import Role
from twostroke.rpc.v1 import control_pb2

OWN_S = 160 * TOKEN_S
SLOW_FIRST = 3200
"""Tokens of a prompt that keeps a worker busy for seconds."""


def test_a_request_for_an_idle_fleet_goes_at_once():
    fleet = VirtualFleet()
    verdict = fleet.admission.enter(fleet.queued("r"), fleet.serving, 0.0)
    assert isinstance(verdict, Placement)
    assert fleet.admission.queued == 0


def test_a_worker_gets_only_as_much_ahead_as_it_needs_and_never_idles():
    fleet = VirtualFleet(prefill=2)
    for number in range(100):
        fleet.ask(f"r{number}")
    fleet.run(until_s=0.0)
    ahead_s = fleet.admission.capacity.ahead_s(fleet.workers["p0"].fleet_worker)
    assert len(fleet.released) <= 2 * (ahead_s / OWN_S + 2)
    fleet.run()
    last_s = max(fleet.first_token_s.values())
    assert len(fleet.first_token_s) == 100
    assert [worker.busy_s / last_s for worker in fleet.workers.values()] == pytest.approx([1, 1], abs=0.03)
    assert len(fleet.reservations) == 0


def test_without_holding_everything_goes_at_once():
    fleet = VirtualFleet(Rules(lone_ahead_s=0.0, queues=False))
    for number in range(50):
        fleet.ask(f"r{number}")
    fleet.run(until_s=0.0)
    assert len(fleet.released) == 50
    assert fleet.admission.wake_at_s is None


def test_an_urgent_class_passes_what_is_held_and_not_what_is_dispatched():
    fleet = VirtualFleet()
    for number in range(50):
        fleet.ask(f"r{number}")
    fleet.ask("high", at_s=0.01, priority=5)
    fleet.run()
    ahead_s = fleet.admission.capacity.ahead_s(fleet.workers["p0"].fleet_worker)
    assert fleet.ttft_s("high") < ahead_s + 3 * OWN_S < max(fleet.first_token_s.values()) / 4


def test_within_a_tenant_the_earliest_limit_goes_first():
    fleet = VirtualFleet()
    fleet.ask("long", tokens=SLOW_FIRST)
    fleet.ask("running", tokens=SLOW_FIRST)
    for name, deadline_s in (("relaxed", 60.0), ("tight", 20.0), ("none", None)):
        fleet.ask(name, deadline_s=deadline_s)
    fleet.run()
    assert [name for name in fleet.released if name in ("relaxed", "tight", "none")] == ["tight", "relaxed", "none"]


def test_one_tenants_flood_delays_anothers_single_requests_by_about_one_quantum():
    alone = VirtualFleet()
    alone.ask("single0", at_s=1.0)
    alone.run()
    fleet = VirtualFleet()
    for number in range(1000):
        fleet.ask(f"flood{number}", tenant="flood")
    singles = [f"single{number}" for number in range(8)]
    for number, name in enumerate(singles):
        fleet.ask(name, at_s=1.0 + 5 * number, tenant="single")
    fleet.run(until_s=50.0)
    dispatched_s = fleet.admission.capacity.ahead_s(fleet.workers["p0"].fleet_worker) + OWN_S
    quantum_s = OWN_S
    for name in singles:
        assert fleet.ttft_s(name) < alone.ttft_s("single0") + dispatched_s + 1.5 * quantum_s
    assert fleet.admission.fairness(fleet.now_s) < 1
    in_turn = VirtualFleet(Rules(lone_ahead_s=0.0, queues=False))
    for number in range(1000):
        in_turn.ask(f"flood{number}", tenant="flood")
    in_turn.ask("single0", at_s=1.0, tenant="single")
    in_turn.run()
    assert in_turn.ttft_s("single0") > 100  # without turns it waits for the whole flood


def test_tenants_that_all_ask_for_more_than_there_is_get_equal_shares():
    fleet = VirtualFleet(prefill=2)
    tokens = {"small": 32, "middle": 160, "large": 800}
    for tenant, size in tokens.items():
        for number in range(20_000 // size):
            fleet.ask(f"{tenant}{number}", tokens=size, tenant=tenant)
    fleet.run(until_s=15.0)
    had = {tenant: sum(fleet.tokens[n] for n in fleet.released if n.startswith(tenant)) for tenant in tokens}
    assert max(had.values()) - min(had.values()) < 2.5 * 800
    assert fleet.admission.fairness(fleet.now_s) == pytest.approx(1.0, abs=0.01)


def test_long_answers_of_many_choices_count_in_turns_as_prompts_do():
    fleet = VirtualFleet()
    load = fleet.decode[0].load
    load.costs.stream_s = 0.01
    fleet.decode[0].report(load, 0.0)
    fleet.admission._selector.ended(100)
    for number in range(100):
        fleet.ask(f"long{number}", tenant="long", tokens=16, most_output_tokens=100)
        fleet.ask(f"short{number}", tenant="short", tokens=16, most_output_tokens=1)
    fleet.run(until_s=0.5)
    had = Counter(name.rstrip("0123456789") for name in fleet.released)
    assert had["short"] > 4 * had["long"] > 0


def test_a_burst_of_choices_takes_no_more_seats_than_there_are():
    fleet = VirtualFleet(prefill=4)
    load = fleet.decode[0].load
    load.slots = 8
    fleet.decode[0].report(load, 0.0)
    for number in range(100):
        fleet.ask(f"r{number}", tokens=17)
    fleet.run(until_s=0.0)
    assert 8 <= len(fleet.released) <= 10
    assert fleet.admission.queued >= 90


def test_one_claimants_long_answers_leave_slots_to_others_until_they_end():
    fleet = VirtualFleet(prefill=4)
    load = fleet.decode[0].load
    load.slots = 8
    fleet.decode[0].report(load, 0.0)
    fleet.ask("b0", tenant="b", tokens=17)
    for number in range(20):
        fleet.ask(f"a{number}", at_s=1.0, tenant="a", tokens=17)
    fleet.run(until_s=3.0)  # none ends: each has its first token, and many to come
    assert fleet.released == ["b0", "a0", "a1", "a2", "a3", "a4", "a5"]
    fleet.ask("b1", at_s=3.0, tenant="b", tokens=17)
    fleet.run(until_s=4.0)
    assert fleet.released[-1] == "b1"
    fleet.leave("a0")
    fleet.run(until_s=5.0)
    assert fleet.released[-1] == "a6"


@pytest.mark.parametrize("rival", [False, True])
def test_only_one_tenant_alone_waits_at_a_full_worker_for_slots_that_short_outputs_may_free(rival):
    """Outputs were short so far, so that every slot is expected to be free soon; these may be longer."""
    fleet = VirtualFleet(prefill=4)
    fleet.admission._selector.ended(2)
    load = fleet.decode[0].load
    load.slots = load.running = 8
    fleet.decode[0].report(load, 0.0)
    if rival:
        fleet.admission.enter(fleet.queued("b", tenant="b", tokens=17), fleet.serving, 0.0)
        fleet.admission.leave(RequestId("b"), 0.0)
    for number in range(40):
        fleet.ask(f"r{number}", tenant="a", tokens=17)
    fleet.run(until_s=0.0)
    assert (len(fleet.released) <= 2 + MOST_ENDING * 8) == rival


def test_many_answers_of_one_request_are_a_claimant_of_their_own_and_a_lower_class_is_no_rival():
    many, active_tenants = Siblings(count=128), ActiveTenants()
    fleet = VirtualFleet()
    active_tenants.arrived(fleet.queued("many", siblings=many), 0.0)
    assert not active_tenants.are_several
    active_tenants.arrived(fleet.queued("one"), 0.0)
    active_tenants.arrived(fleet.queued("high", priority=1), 0.0)
    assert active_tenants.has_rivals(ActiveTenant.of(fleet.queued("more", siblings=many)))
    assert not active_tenants.has_rivals(ActiveTenant.of(fleet.queued("high", priority=1)))


def test_held_requests_go_where_there_is_time_when_their_turn_comes():
    fleet = VirtualFleet(prefill=2)
    for number in range(60):
        fleet.ask(f"r{number}")
    fleet.run(until_s=1.0)
    fleet.hang("p0")
    fleet.ask("last", at_s=1.1)
    fleet.run(until_s=30.0)
    assert fleet.went_to["last"] == "p1"
    assert fleet.admission.queued == 0


def test_a_request_that_is_decided_anew_does_not_count_as_its_own_rival():
    seen = []
    priced = Priced(REMOTE)

    def watched(snapshot):
        seen.append(snapshot.prefill[0])
        return priced(snapshot)

    fleet = VirtualFleet(policy=watched)
    reporting(fleet.workers["p0"].fleet_worker, 0.0, queued_s=100.0)
    assert fleet.admission.enter(fleet.queued("r"), fleet.serving, 0.0) is None
    reporting(fleet.workers["p0"].fleet_worker, 1.0)
    assert [verdict.request_id for verdict in fleet.admission.wake(fleet.serving, 1.0)] == ["r"]
    assert [(view.queue_s, view.requests, view.cached_blocks) for view in seen] == [(100.0, 0, 0), (0.0, 0, 0)]


def test_policies_that_choose_differently_each_time_are_asked_once():
    asked: list[int] = []
    choose = policy_named("round-robin")

    def counted(snapshot):
        asked.append(snapshot.turn)
        return choose(snapshot)

    fleet = VirtualFleet(Rules(lone_ahead_s=0.0, reconsiders=False), prefill=3, policy=counted)
    for number in range(90):
        fleet.ask(f"r{number}")
    fleet.run()
    assert len(asked) == 90
    went = list(fleet.went_to.values())
    assert [went.count(worker) for worker in fleet.workers] == [30, 30, 30]


def test_a_held_head_does_not_block_those_whose_worker_is_free():
    def by_length(snapshot):
        return policy_named("round-robin")(
            type(snapshot)(
                **{name: getattr(snapshot, name) for name in snapshot.__slots__} | {"turn": snapshot.known_tokens > 160}
            )
        )

    fleet = VirtualFleet(Rules(lone_ahead_s=0.0, reconsiders=False), prefill=2, policy=by_length)
    for number in range(3 * HEADS):
        fleet.ask(f"long{number}", tokens=320)
    fleet.ask("short", at_s=0.1)
    fleet.ask("another", at_s=0.1)
    fleet.run()
    assert {fleet.went_to["short"], fleet.went_to["another"]} == {"p0"}
    assert fleet.ttft_s("short") < 2 * OWN_S


def test_when_all_decode_workers_are_gone_held_requests_are_told_to_look_again():
    fleet = VirtualFleet()
    for number in range(20):
        fleet.ask(f"r{number}")
    fleet.run(until_s=0.0)
    held = fleet.admission.queued
    fleet.decode = []
    fleet._wake()
    assert len(fleet.stranded) == held > 0
    assert fleet.admission.queued == 0


def test_a_held_requests_worker_that_left_is_replaced_whatever_the_policy():
    fleet = VirtualFleet(Rules(lone_ahead_s=0.0, reconsiders=False), prefill=2, policy=policy_named("round-robin"))
    for number in range(30):
        fleet.ask(f"r{number}")
    fleet.run(until_s=0.0)
    before = set(fleet.released)
    del fleet.workers["p1"]
    fleet.run(until_s=60.0)
    later = set(fleet.released) - before
    assert len(later) == 30 - len(before)
    assert {fleet.went_to[name] for name in later} == {"p0"}


def test_one_that_leaves_while_held_lets_the_others_go():
    fleet = VirtualFleet()
    for number in range(20):
        fleet.ask(f"r{number}")
    fleet.run(until_s=0.0)
    held = [name for name in fleet.asked_s if name not in fleet.released]
    for name in held[:5]:
        fleet.leave(name)
    fleet.run()
    assert set(fleet.first_token_s) == set(fleet.asked_s) - set(held[:5])
    assert len(fleet.reservations) == 0


def test_one_that_lost_its_worker_is_neither_held_nor_refused():
    fleet = VirtualFleet(Rules(lone_ahead_s=0.0, slo_ttft_s=0.5, most_queued=5))
    for number in range(20):
        fleet.ask(f"r{number}", tokens=32)
    fleet.run(until_s=0.0)
    assert fleet.admission.queued
    again = fleet.queued("again", tokens=SLOW_FIRST, is_urgent=True)
    assert isinstance(fleet.admission.enter(again, fleet.serving, fleet.now_s), Placement)


def test_decode_workers_without_pages_hold_requests_back_too():
    fleet = VirtualFleet()
    reporting(fleet.decode[0], 0.0, waiting=4)
    assert fleet.admission.enter(fleet.queued("r"), fleet.serving, 0.0) is None
    assert fleet.admission.wake(fleet.serving, 0.0) == []
    reporting(fleet.decode[0], 0.1, waiting=0)
    assert [verdict.request_id for verdict in fleet.admission.wake(fleet.serving, 0.1)] == ["r"]


def test_reservations_of_other_routers_hold_nobody_back():
    fleet = VirtualFleet()
    other = VirtualFleet()
    for number in range(20):
        other.ask(f"other{number}", tokens=1600)
    other.run(until_s=0.0)
    watch = other.reservations.watch(lambda: None)
    fleet.reservations.apply(RequestId("router"), other.reservations.take(watch), 0.0, whole=True)
    assert fleet.reservations.on(fleet.workers["p0"].fleet_worker.worker_id).seconds > 10
    assert isinstance(fleet.admission.enter(fleet.queued("r"), fleet.serving, 0.0), Placement)


def test_what_a_worker_needs_ahead_follows_its_steps_and_the_way_there():
    capacity = VirtualFleet().admission.capacity
    fast, slow = fleet_worker("p0", Role.PREFILL), fleet_worker("p1", Role.PREFILL, token_s=10 * TOKEN_S)
    assert capacity.ahead_s(slow) - capacity.ahead_s(fast) == pytest.approx(2 * 32 * 9 * TOKEN_S)
    before_s = capacity.ahead_s(fast)
    for _ in range(200):
        capacity.opened_in(0.1)
    assert capacity.ahead_s(fast) - before_s == pytest.approx(2 * (0.1 - 0.005), rel=0.01)


def test_five_thousand_held_requests_make_no_call_slow():
    decisions: list[int] = []
    priced = VirtualFleet(prefill=4)
    select = priced.admission._selector.select

    def counted(*arguments, **options):
        decisions.append(1)
        return select(*arguments, **options)

    priced.admission._selector.select = counted
    for number in range(5000):
        deadline_s = 1e5 + number % 7 if number % 2 else None
        queued = priced.queued(f"r{number}", tenant=f"t{number % 50}", priority=number % 3, deadline_s=deadline_s)
        assert not isinstance(priced.admission.enter(queued, priced.serving, 0.0), Refused)
    assert len(decisions) == 5000
    assert priced.admission.queued > 4900
    for number in range(50):
        decisions.clear()
        now_s = 1.0 + number
        for worker in priced.workers.values():
            reporting(worker.fleet_worker, now_s)
        priced.admission.wake(priced.serving, now_s)
        assert len(decisions) <= MOST_DECIDED


def test_a_lone_claimants_work_is_not_held_back_and_a_second_ones_waits_for_it_once():
    fleet = VirtualFleet(Rules(lone_ahead_s=2.0))
    for number in range(100):
        fleet.ask(f"a{number}", tenant="a")
    for number in range(4):
        fleet.ask(f"b{number}", at_s=0.01 + 4 * number, tenant="b")
    fleet.run()
    assert fleet.released.index("b0") * OWN_S == pytest.approx(2.0, abs=2 * OWN_S)
    assert fleet.ttft_s("b0") < 2.0 + 3 * OWN_S
    ahead_s = fleet.admission.capacity.ahead_s(fleet.workers["p0"].fleet_worker)
    for later in ("b1", "b2", "b3"):
        assert fleet.ttft_s(later) < ahead_s + 3 * OWN_S


def test_a_claimant_that_has_not_asked_for_a_minute_is_forgotten():
    fleet = VirtualFleet(Rules(lone_ahead_s=2.0))
    for at_s, tenant in ((0.0, "a"), (1.0, "b"), (70.0, "a")):
        fleet.ask(f"{tenant}{at_s}", at_s=at_s, tenant=tenant)
    fleet.run(until_s=2.0)
    assert fleet.admission.capacity.tenants.are_several
    fleet.run()
    assert not fleet.admission.capacity.tenants.are_several


@pytest.mark.parametrize(("slots", "max_waiting"), [(64, 1024), (512, 1024), (64, 16)])
def test_a_lone_tenants_burst_of_short_answers_waits_here_and_not_where_it_would_be_refused(slots, max_waiting):
    """The worker's own queue is bounded: beyond it, requests would get an error though there is room here."""
    fleet = VirtualFleet(Rules(), prefill=1)
    costs = control_pb2.StepCosts(step_s=0.01, prompt_token_s=2e-5, step_tokens=2048, step_target_s=0.04)
    load = control_pb2.Load(
        pages_free=10**6,
        pages_total=10**6,
        costs=costs,
        running=slots,
        slots=slots,
        max_waiting=max_waiting,
        prefill_busy_s=1.0,
    )
    for worker in (fleet.decode[0], fleet.workers["p0"].fleet_worker):
        worker.report(load, 0.0)
    for _ in range(300):
        fleet.admission._selector.ended(1)
    sent = 0
    for number in range(1000):
        request = fleet.queued(f"r{number}", tokens=32, most_output_tokens=1)
        entered = fleet.admission.enter(request, fleet.serving, 0.0)
        verdicts = [entered, *fleet.admission.wake(fleet.serving, 0.0)]
        sent += sum(isinstance(verdict, Placement) for verdict in verdicts)
    assert MOST_LONE_ENDING * max_waiting <= sent <= MOST_LONE_ENDING * max_waiting + 2
    assert fleet.admission.queued == 1000 - sent


def test_a_tenant_has_rivals_only_in_classes_that_are_not_below_its_own():
    active = ActiveTenants()
    fleet = VirtualFleet()
    mine = fleet.queued("mine", tenant="a", priority=1)
    claim = ActiveTenant.of(mine)
    active.arrived(fleet.queued("below", tenant="b", priority=0), 0.0)
    assert not active.has_rivals(claim)
    active.arrived(mine, 0.0)
    active.arrived(mine, 1.0)
    assert not active.has_rivals(claim), "it is not a rival of its own"
    active.arrived(fleet.queued("equal", tenant="c", priority=1), 2.0)
    assert active.has_rivals(claim)
    active.arrived(mine, 100.0)
    assert not active.has_rivals(claim), "the others came long ago"


def test_asking_for_rivals_costs_the_same_however_many_tenants_are_active():
    fleet, calls = VirtualFleet(), []
    claim = ActiveTenant.of(fleet.queued("mine", tenant="mine", priority=1))
    for tenants in (5, 500):
        active = ActiveTenants()
        for number in range(tenants):
            active.arrived(fleet.queued(f"r{number}", tenant=f"t{number}", priority=0), 0.0)
        calls.append(calls_of(lambda active=active: active.has_rivals(claim)))
    assert calls[1] < 2 * calls[0]
