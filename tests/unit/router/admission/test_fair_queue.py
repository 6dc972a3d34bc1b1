"""Tests of whose turn it is: tenants share in proportion, whatever they ask for."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import Counter

import pytest

from router.admission.fair_queue import MOST_CREDIT_QUANTA, MOST_LOOKED_AT, MOST_OVERDRAWN, SIBLINGS_AT_ONCE, FairQueue
from router.admission.queued_request import QueuedRequest, Siblings
from router.routing.selector import RoutingParams
from tests.unit.router.calls import calls_of
from tests.unit.router.queued import an_attempt
from twostroke.base.ids import RequestId


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Priced(QueuedRequest):
    cost_s: float = 1.0


def queued(
    name: str, tenant: str = "a", *, priority: int = 0, limit_s=None, at_s: float = 0.0, cost_s: float = 1.0
) -> Priced:
    return Priced(
        attempt=an_attempt(name, 1),
        routing=RoutingParams(priority=priority, tenant=tenant),
        limit_s=limit_s,
        arrived_s=at_s,
        cost_s=cost_s,
    )


def add(queue: FairQueue, request: Priced) -> None:
    queue.add(request, request.cost_s)


def filled(*waiting: Priced) -> FairQueue:
    queue = FairQueue()
    for each in waiting:
        add(queue, each)
    return queue


def drained(queue: FairQueue, count: int | None = None) -> list[str]:
    served: list[str] = []
    while len(queue) and len(served) != count:
        served.append(queue.first(1)[0])
        queue.serve(RequestId(served[-1]))
    return served


def test_a_higher_class_goes_first_whatever_its_limit():
    queue = filled(queued("low", limit_s=1.0), queued("high", priority=2, limit_s=9.0), queued("middle", priority=1))
    assert drained(queue) == ["high", "middle", "low"]


def test_a_tenants_own_go_by_limit_then_by_arrival():
    waiting = [
        queued("none", at_s=0.0),
        queued("late", limit_s=9.0, at_s=1.0),
        queued("second", limit_s=5.0, at_s=3.0),
        queued("first", limit_s=5.0, at_s=2.0),
    ]
    assert drained(filled(*waiting)) == ["first", "second", "late", "none"]


def test_many_answers_of_one_request_let_what_comes_later_pass():
    siblings = [
        dataclasses.replace(queued(f"sibling{number}"), siblings=Siblings(number))
        for number in range(3 * SIBLINGS_AT_ONCE)
    ]
    order = drained(filled(*siblings, queued("short", at_s=5.0)))
    assert order.index("short") == SIBLINGS_AT_ONCE
    assert order[SIBLINGS_AT_ONCE + 1 :] == [each.request_id for each in siblings[SIBLINGS_AT_ONCE:]]


def test_tenants_take_queue_and_a_newcomer_gains_nothing_by_its_absence():
    queue = filled(*[queued(f"a{number}", "a") for number in range(20)])
    assert drained(queue, 10) == [f"a{number}" for number in range(10)]
    for number in range(5):
        add(queue, queued(f"b{number}", "b"))
    order = "".join(name[0] for name in drained(queue))
    assert order.count("b") == 5
    assert order[:10].count("b") == 5
    assert "bb" not in order[:8]


def test_a_tenant_whose_worker_was_busy_keeps_a_few_turns_and_not_all_that_it_missed():
    queue = filled(*[queued(f"a{n}", "a") for n in range(50)], *[queued(f"b{n}", "b") for n in range(100)])
    for number in range(40):
        queue.serve(RequestId(f"b{number}"))  # a's worker takes none meanwhile
    order = "".join(name[0] for name in drained(queue, 20))
    assert MOST_CREDIT_QUANTA <= order.index("b") <= MOST_CREDIT_QUANTA + 2
    assert "bb" not in order, "from then on they take turns"


def test_shares_are_equal_in_seconds_whatever_single_requests_cost():
    draw = random.Random(3)
    costs = {"cheap": 0.1, "dear": 3.0, "mixed": 0.0}
    queue = FairQueue()
    cost_of: dict[str, float] = {}
    for tenant, cost_s in costs.items():
        for number in range(600):
            name = f"{tenant}{number}"
            cost_of[name] = cost_s or draw.uniform(0.05, 6)
            add(queue, queued(name, tenant, cost_s=cost_of[name]))
    had_s: Counter[str] = Counter()
    for name in drained(queue, 620):
        had_s[name.rstrip("0123456789")] += cost_of[name]
        assert max(had_s.values()) - min(had_s[tenant] for tenant in costs) < 2 * 6 + 3
    assert min(had_s.values()) > 50


def test_looking_ahead_shows_the_order_in_which_they_would_go_and_changes_nothing():
    draw = random.Random(5)
    queue = FairQueue()
    for number in range(200):
        tenant, priority = draw.choice("abcde"), draw.randrange(2)
        add(queue, queued(f"r{number}", tenant, priority=priority, cost_s=draw.uniform(0.9, 1.1)))
    drained(queue, 20)
    seen = queue.first(40)
    assert queue.first(40) == seen
    assert len(set(seen)) == 40
    assert set(seen[:20]) <= set(drained(queue, 30))  # the quantum follows the costs: neighbours may swap


def test_an_expensive_request_is_never_passed_for_ever():
    queue = filled(queued("huge", "a", cost_s=500.0), *[queued(f"b{n}", "b", cost_s=0.1) for n in range(300)])
    drained(queue, 5)
    assert "huge" in queue.first(16) or "huge" not in list(queue)


def test_who_keeps_a_single_request_waiting_gets_no_more_than_its_share():
    waiting = filled(*(queued(f"a{rank}", cost_s=1.0) for rank in range(2000)), queued("b", "b", cost_s=100.0))
    had_s = {"a": 0.0, "b": 0.0}
    for rank in range(1000):
        (first,) = waiting.first(1)
        tenant = first[0]
        waiting.serve(first)
        if tenant == "b":
            add(waiting, queued(f"b{rank}", "b", cost_s=100.0))
        had_s[tenant] += 100.0 if tenant == "b" else 1.0
    assert abs(had_s["a"] - had_s["b"]) <= 200


def test_tenants_of_a_moment_are_not_remembered_without_end():
    waiting = filled(queued("last", "last", limit_s=9.0))
    for rank in range(5 * MOST_OVERDRAWN):
        add(waiting, queued(str(rank), str(rank)))
        waiting.serve(RequestId(str(rank)))
    assert len(waiting._classes[0].overdrawn_s) <= MOST_OVERDRAWN


def test_one_that_left_costs_its_tenant_nothing():
    queue = filled(queued("a0", "a", cost_s=50.0), queued("a1", "a"), queued("b0", "b"), queued("b1", "b"))
    queue.remove(RequestId("a0"))
    assert sorted(drained(queue, 2)) == ["a1", "b0"]
    assert sorted(queue.queued_s_by_tenant()) == ["b"]


def test_what_goes_before_a_newcomer_is_what_will_be_served_before_it():
    draw = random.Random(7)
    for _ in range(30):
        queue = FairQueue()
        cost_of: dict[str, float] = {}
        for number in range(120):
            cost_of[f"r{number}"] = draw.uniform(0.5, 1.5)
            tenant = draw.choice("aaaaaabbc")
            add(queue, queued(f"r{number}", tenant, cost_s=cost_of[f"r{number}"], at_s=float(number)))
        drained(queue, draw.randrange(40))
        mine = queued("mine", draw.choice("abcd"), at_s=1000.0)
        held_s = sum(cost_of[name] for name in queue)
        predicted_s = queue.share_before(mine) * held_s
        add(queue, mine)
        served = drained(queue)
        actual_s = sum(cost_of[name] for name in served[: served.index("mine")])
        assert abs(predicted_s - actual_s) < 5.0  # of up to 120: a round of four tenants, give or take one request


def test_who_holds_less_than_its_share_takes_a_place_of_who_holds_more():
    queue = filled(
        *[queued(f"a{n}", "a", at_s=n) for n in range(5)],
        *[queued(f"b{n}", "b") for n in range(2)],
        queued("h", priority=1),
    )
    assert queue.displaced_by(queued("new", "c")) == "a4", "of the largest tenant the least urgent"
    assert queue.displaced_by(queued("new", "c", priority=-1)) == "a4", "room is shared whatever the class"
    assert queue.displaced_by(queued("new", "a")) is None
    assert queue.displaced_by(queued("new", "a", priority=1)) == "a4", "its own, of a lower class"
    assert queue.displaced_by(queued("new", "b", priority=1)) == "a4"
    add(queue, queued("b2", "b", priority=1))
    add(queue, queued("b3", "b", priority=1))
    add(queue, queued("b4", "b", priority=1))
    assert queue.displaced_by(queued("new", "b", priority=2)) == "b1", "it holds its share"


def test_one_tenants_classes_displace_as_if_there_were_no_tenants():
    queue = filled(*[queued(f"r{n}", priority=n % 3, at_s=n) for n in range(9)])
    assert queue.displaced_by(queued("new")) is None
    for priority in (1, 2, 50):
        assert queue.displaced_by(queued("new", priority=priority)) == "r6"
    assert queue.displaced_by(queued("new", priority=-1)) is None


@pytest.mark.parametrize("seed", range(4))
def test_no_flood_of_any_class_takes_more_than_a_share_from_tenants_that_hold_no_more(seed):
    draw = random.Random(seed)
    room, others = 110, [f"t{number}" for number in range(10)]
    names = (f"r{number}" for number in itertools.count())
    queue, tenant_of = FairQueue(), dict[str, str]()

    def ask(tenant: str, priority: int) -> bool:
        request = queued(next(names), tenant, priority=priority, at_s=float(len(tenant_of)))
        if len(queue) == room:
            gone = queue.displaced_by(request)
            if gone is None:
                return False
            queue.remove(gone)
        add(queue, request)
        tenant_of[request.request_id] = tenant
        return True

    def held(tenant: str) -> int:
        return sum(tenant_of[name] == tenant for name in queue)

    while len(queue) < room:
        ask(draw.choice(others), draw.randrange(-2, 3))
    shares = {tenant: min(held(tenant), room // 11) for tenant in others}
    for _ in range(500):
        ask("flood", 100)
        assert held("flood") <= room // 11
    assert all(held(tenant) >= share for tenant, share in shares.items())
    for name in list(queue):  # the others give up one after the other, and the flood takes what is free
        if tenant_of[name] != "flood":
            queue.remove(RequestId(name))
            ask("flood", 100)
    assert held("flood") == room
    for tenant in others:
        assert ask(tenant, -100), "who comes again finds room"
    for _ in range(3000):
        ask(draw.choice([*others, "flood", "flood"]), draw.randrange(-2, 101))
    assert all(held(tenant) >= room // 11 for tenant in others)


def test_the_order_survives_a_random_history_and_looking_costs_the_same_however_many_wait():
    draw = random.Random(11)
    queue, waiting = FairQueue(), set()
    for number in range(3000):
        name = f"r{number}"
        add(queue, queued(name, f"t{draw.randrange(40)}", priority=draw.randrange(3), cost_s=draw.expovariate(1)))
        waiting.add(name)
        if draw.random() < 0.4:
            gone = draw.choice(queue.first(8)) if draw.random() < 0.7 else draw.choice(sorted(waiting))
            (queue.serve if draw.random() < 0.7 else queue.remove)(RequestId(gone))
            waiting.discard(gone)
        assert len(queue) == len(waiting)
    assert set(queue) == waiting
    assert calls_of(lambda: queue.first(16)) < 3 * calls_of(
        lambda: filled(*[queued(f"r{n}") for n in range(16)]).first(16)
    )
    assert set(drained(queue)) == waiting


def test_tenants_that_come_and_go_behind_others_leave_nothing():
    queue = filled(queued("urgent", "x", priority=1), queued("stays", "stays"))
    for number in range(1000):
        add(queue, queued(f"r{number}", f"t{number % 3}"))
        queue.remove(RequestId(f"r{number}"))
    assert len(queue._classes[0].heap) < 100
    assert queue.first(2) == ["urgent", "stays"]


def test_many_tenants_with_equal_queues_are_predicted_from_some_of_them() -> None:
    """Each arrival asks: a client without a key can be a new tenant with each request."""
    shares = []
    for tenants in (MOST_LOOKED_AT - 1, 20 * MOST_LOOKED_AT):
        queue = FairQueue()
        for number in range(tenants):
            add(queue, queued(f"r{number}", f"t{number}"))
        queue.quantum_s = 1.0
        shares.append(queue.share_before(queued("new", "new")))
    assert shares == pytest.approx([1.0, 1.0])


def test_predicting_a_share_costs_the_same_however_many_tenants_wait() -> None:
    calls = []
    for tenants in (MOST_LOOKED_AT, 20 * MOST_LOOKED_AT):
        queue = filled(*(queued(f"r{number}", f"t{number}") for number in range(tenants)))
        calls.append(calls_of(functools.partial(queue.share_before, queued("new", "new"))))
    assert calls[1] < 1.5 * calls[0]


def test_tenants_that_are_not_looked_at_have_no_more_queued_than_they_have() -> None:
    queue = FairQueue()
    for number in range(MOST_LOOKED_AT):
        add(queue, queued(f"h{number}", f"heavy {number}", cost_s=10.0))
    for number in range(2000):
        add(queue, queued(f"l{number}", f"light {number}", cost_s=0.01))
    queue.quantum_s = 1.0
    assert queue.share_before(queued("new", "new")) == pytest.approx((256 + 20) / (2560 + 20))
