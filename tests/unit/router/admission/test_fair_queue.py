"""Whose turn it is: tenants share in proportion, whatever they ask for."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections import Counter

import pytest

from router.admission.fair_queue import MOST_OVERDRAWN, SIBLINGS_AT_ONCE, Turn, Turns
from twostroke.ids import RequestId


def turn(name: str, tenant: str = "a", *, priority: int = 0, limit_s=None, at_s: float = 0.0, cost_s: float = 1.0):
    return Turn(
        request_id=RequestId(name), priority=priority, tenant=tenant, limit_s=limit_s, arrived_s=at_s, cost_s=cost_s
    )


def filled(*waiting: Turn) -> Turns:
    turns = Turns()
    for each in waiting:
        turns.add(each)
    return turns


def drained(turns: Turns, count: int | None = None) -> list[str]:
    served: list[str] = []
    while len(turns) and len(served) != count:
        served.append(turns.first(1)[0])
        turns.serve(RequestId(served[-1]))
    return served


def test_a_higher_class_goes_first_whatever_its_limit():
    turns = filled(turn("low", limit_s=1.0), turn("high", priority=2, limit_s=9.0), turn("middle", priority=1))
    assert drained(turns) == ["high", "middle", "low"]


def test_a_tenants_own_go_by_limit_then_by_arrival():
    waiting = [
        turn("none", at_s=0.0),
        turn("late", limit_s=9.0, at_s=1.0),
        turn("second", limit_s=5.0, at_s=3.0),
        turn("first", limit_s=5.0, at_s=2.0),
    ]
    assert drained(filled(*waiting)) == ["first", "second", "late", "none"]


def test_many_answers_of_one_request_let_what_comes_later_pass():
    siblings = [
        dataclasses.replace(turn(f"sibling{number}"), siblings_before=number) for number in range(3 * SIBLINGS_AT_ONCE)
    ]
    order = drained(filled(*siblings, turn("short", at_s=5.0)))
    assert order.index("short") == SIBLINGS_AT_ONCE
    assert order[SIBLINGS_AT_ONCE + 1 :] == [each.request_id for each in siblings[SIBLINGS_AT_ONCE:]]


def test_tenants_take_turns_and_a_newcomer_gains_nothing_by_its_absence():
    turns = filled(*[turn(f"a{number}", "a") for number in range(20)])
    assert drained(turns, 10) == [f"a{number}" for number in range(10)]
    for number in range(5):
        turns.add(turn(f"b{number}", "b"))
    order = "".join(name[0] for name in drained(turns))
    assert order.count("b") == 5
    assert order[:10].count("b") == 5
    assert "bb" not in order[:8]


def test_shares_are_equal_in_seconds_whatever_single_requests_cost():
    draw = random.Random(3)
    costs = {"cheap": 0.1, "dear": 3.0, "mixed": 0.0}
    turns = Turns()
    cost_of: dict[str, float] = {}
    for tenant, cost_s in costs.items():
        for number in range(600):
            name = f"{tenant}{number}"
            cost_of[name] = cost_s or draw.uniform(0.05, 6)
            turns.add(turn(name, tenant, cost_s=cost_of[name]))
    had_s: Counter[str] = Counter()
    for name in drained(turns, 620):
        had_s[name.rstrip("0123456789")] += cost_of[name]
        assert max(had_s.values()) - min(had_s[tenant] for tenant in costs) < 2 * 6 + 3
    assert min(had_s.values()) > 50


def test_looking_ahead_shows_the_order_in_which_they_would_go_and_changes_nothing():
    draw = random.Random(5)
    turns = Turns()
    for number in range(200):
        tenant, priority = draw.choice("abcde"), draw.randrange(2)
        turns.add(turn(f"r{number}", tenant, priority=priority, cost_s=draw.uniform(0.9, 1.1)))
    drained(turns, 20)
    seen = turns.first(40)
    assert turns.first(40) == seen
    assert len(set(seen)) == 40
    assert set(seen[:20]) <= set(drained(turns, 30))  # the quantum follows the costs: neighbours may swap


def test_an_expensive_request_is_never_passed_for_ever():
    turns = filled(turn("huge", "a", cost_s=500.0), *[turn(f"b{n}", "b", cost_s=0.1) for n in range(300)])
    drained(turns, 5)
    assert "huge" in turns.first(16) or "huge" not in list(turns)


def test_who_keeps_a_single_request_waiting_gets_no_more_than_its_share():
    waiting = filled(*(turn(f"a{rank}", cost_s=1.0) for rank in range(2000)), turn("b", "b", cost_s=100.0))
    had_s = {"a": 0.0, "b": 0.0}
    for rank in range(1000):
        (first,) = waiting.first(1)
        tenant = first[0]
        waiting.serve(first)
        if tenant == "b":
            waiting.add(turn(f"b{rank}", "b", cost_s=100.0))
        had_s[tenant] += 100.0 if tenant == "b" else 1.0
    assert abs(had_s["a"] - had_s["b"]) <= 200


def test_tenants_of_a_moment_are_not_remembered_without_end():
    waiting = filled(turn("last", "last", limit_s=9.0))
    for rank in range(5 * MOST_OVERDRAWN):
        waiting.add(turn(str(rank), str(rank)))
        waiting.serve(RequestId(str(rank)))
    assert len(waiting._classes[0].overdrawn_s) <= MOST_OVERDRAWN


def test_one_that_left_costs_its_tenant_nothing():
    turns = filled(turn("a0", "a", cost_s=50.0), turn("a1", "a"), turn("b0", "b"), turn("b1", "b"))
    turns.remove(RequestId("a0"))
    assert sorted(drained(turns, 2)) == ["a1", "b0"]
    assert sorted(turns.held_by_tenant()) == ["b"]


def test_what_goes_before_a_newcomer_is_what_will_be_served_before_it():
    draw = random.Random(7)
    for _ in range(30):
        turns = Turns()
        cost_of: dict[str, float] = {}
        for number in range(120):
            cost_of[f"r{number}"] = draw.uniform(0.5, 1.5)
            tenant = draw.choice("aaaaaabbc")
            turns.add(turn(f"r{number}", tenant, cost_s=cost_of[f"r{number}"], at_s=float(number)))
        drained(turns, draw.randrange(40))
        mine = turn("mine", draw.choice("abcd"), at_s=1000.0)
        held_s = sum(cost_of[name] for name in turns)
        predicted_s = turns.share_before(mine) * held_s
        turns.add(mine)
        served = drained(turns)
        actual_s = sum(cost_of[name] for name in served[: served.index("mine")])
        assert abs(predicted_s - actual_s) < 5.0  # of up to 120: a round of four tenants, give or take one request


def test_who_holds_less_than_its_share_takes_a_place_of_who_holds_more():
    turns = filled(
        *[turn(f"a{n}", "a", at_s=n) for n in range(5)], *[turn(f"b{n}", "b") for n in range(2)], turn("h", priority=1)
    )
    assert turns.displaced_by(turn("new", "c")) == "a4", "of the largest tenant the least urgent"
    assert turns.displaced_by(turn("new", "c", priority=-1)) == "a4", "room is shared whatever the class"
    assert turns.displaced_by(turn("new", "a")) is None
    assert turns.displaced_by(turn("new", "a", priority=1)) == "a4", "its own, of a lower class"
    assert turns.displaced_by(turn("new", "b", priority=1)) == "a4"
    turns.add(turn("b2", "b", priority=1))
    turns.add(turn("b3", "b", priority=1))
    turns.add(turn("b4", "b", priority=1))
    assert turns.displaced_by(turn("new", "b", priority=2)) == "b1", "it holds its share"


def test_one_tenants_classes_displace_as_if_there_were_no_tenants():
    turns = filled(*[turn(f"r{n}", priority=n % 3, at_s=n) for n in range(9)])
    assert turns.displaced_by(turn("new")) is None
    for priority in (1, 2, 50):
        assert turns.displaced_by(turn("new", priority=priority)) == "r6"
    assert turns.displaced_by(turn("new", priority=-1)) is None


@pytest.mark.parametrize("seed", range(4))
def test_no_flood_of_any_class_takes_more_than_a_share_from_tenants_that_hold_no_more(seed):
    draw = random.Random(seed)
    room, others = 110, [f"t{number}" for number in range(10)]
    names = (f"r{number}" for number in itertools.count())
    turns, tenant_of = Turns(), dict[str, str]()

    def ask(tenant: str, priority: int) -> bool:
        request = turn(next(names), tenant, priority=priority, at_s=float(len(tenant_of)))
        if len(turns) == room:
            gone = turns.displaced_by(request)
            if gone is None:
                return False
            turns.remove(gone)
        turns.add(request)
        tenant_of[request.request_id] = tenant
        return True

    def held(tenant: str) -> int:
        return sum(tenant_of[name] == tenant for name in turns)

    while len(turns) < room:
        ask(draw.choice(others), draw.randrange(-2, 3))
    shares = {tenant: min(held(tenant), room // 11) for tenant in others}
    for _ in range(500):
        ask("flood", 100)
        assert held("flood") <= room // 11
    assert all(held(tenant) >= share for tenant, share in shares.items())
    for name in list(turns):  # the others give up one after the other, and the flood takes what is free
        if tenant_of[name] != "flood":
            turns.remove(RequestId(name))
            ask("flood", 100)
    assert held("flood") == room
    for tenant in others:
        assert ask(tenant, -100), "who comes again finds room"
    for _ in range(3000):
        ask(draw.choice([*others, "flood", "flood"]), draw.randrange(-2, 101))
    assert all(held(tenant) >= room // 11 for tenant in others)


def test_the_order_survives_a_random_history_and_looking_costs_the_same_however_many_wait():
    draw = random.Random(11)
    turns, waiting = Turns(), set()
    for number in range(3000):
        name = f"r{number}"
        turns.add(turn(name, f"t{draw.randrange(40)}", priority=draw.randrange(3), cost_s=draw.expovariate(1)))
        waiting.add(name)
        if draw.random() < 0.4:
            gone = draw.choice(turns.first(8)) if draw.random() < 0.7 else draw.choice(sorted(waiting))
            (turns.serve if draw.random() < 0.7 else turns.remove)(RequestId(gone))
            waiting.discard(gone)
        assert len(turns) == len(waiting)
    assert set(turns) == waiting
    assert calls_of(lambda: turns.first(16)) < 3 * calls_of(
        lambda: filled(*[turn(f"r{n}") for n in range(16)]).first(16)
    )
    assert set(drained(turns)) == waiting


def test_tenants_that_come_and_go_behind_others_leave_nothing():
    turns = filled(turn("urgent", "x", priority=1), turn("stays", "stays"))
    for number in range(1000):
        turns.add(turn(f"r{number}", f"t{number % 3}"))
        turns.remove(RequestId(f"r{number}"))
    assert len(turns._classes[0].heap) < 100
    assert turns.first(2) == ["urgent", "stays"]


def calls_of(function) -> int:
    """Work that does not depend on how busy the machine is."""
    count = 0

    def note(frame, event, argument) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
