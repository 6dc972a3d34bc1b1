"""Policies as pure functions: what each would do, in plain examples."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from router.routing.policies import POLICIES, policy_named
from router.routing.policies.priced import Priced, Prices
from router.routing.policy import Snapshot, WorkerView
from twostroke.base.errors import ConfigError
from twostroke.base.ids import WorkerId
from twostroke.scheduler.cost import StepCost

P0, P1, D0, D1 = (WorkerId(text) for text in ("prefill-0", "prefill-1", "decode-0", "decode-1"))


COST = StepCost(step_s=0.02, stream_s=0.0003, prompt_token_s=0.001)


def view(worker: WorkerId, **facts: Any) -> WorkerView:
    idle: dict[str, Any] = {"pages_free": 1000, "cost": COST, "step_tokens": 512, "step_target_s": 0.1}
    idle["resident"] = facts.get("depths", (0,))
    return WorkerView(worker=worker, **(idle | facts))


def snapshot(decode: list[WorkerView], prefill: list[WorkerView], tokens: int = 1600, **facts: Any) -> Snapshot:
    return Snapshot(
        known_tokens=tokens,
        full_blocks=tokens // 16,
        block_size=16,
        page_bytes=100_000,
        decode=tuple(decode),
        prefill=tuple(prefill),
        **facts,
    )


def test_an_unknown_policy_is_refused_with_the_list_of_all() -> None:
    with pytest.raises(ConfigError, match=r"kv, .*random, round-robin, .*least-tokens; got 'best'") as raised:
        policy_named("best")
    assert raised.value.field == "policy"


def test_equal_idle_workers_keep_the_two_strokes_apart() -> None:
    assert Priced()(snapshot([view(D0)], [view(P0)])).source == P0


def test_a_warm_prefill_worker_wins() -> None:
    decision = Priced()(snapshot([view(D0)], [view(P0), view(P1, depths=(80,))]))
    assert decision.source == P1
    assert decision.forecast.cached_blocks == 80
    assert decision.forecast.computed_tokens == 20 * 16


def test_a_warm_prefill_worker_loses_once_its_queue_is_longer_than_what_it_saves() -> None:
    alone = Priced(Prices(pulls_from_peers=False))

    def source(queued: int) -> WorkerId | None:
        warm = view(P1, depths=(80,), queue_s=queued / 1000)
        return alone(snapshot([view(D0, running=8)], [view(P0), warm])).source

    assert source(queued=1100) == P1
    assert source(queued=1500) == P0


def test_near_saturation_a_warm_worker_is_worth_a_longer_queue() -> None:
    alone = Priced(Prices(pulls_from_peers=False))

    def source(utilisation: float) -> WorkerId | None:
        warm = view(P1, depths=(80,), queue_s=1.5, utilisation=utilisation)
        return alone(snapshot([view(D0, running=8)], [view(P0, utilisation=utilisation), warm])).source

    assert source(utilisation=0.0) == P0
    assert source(utilisation=0.8) == P1


def test_without_prefill_workers_the_decode_worker_computes() -> None:
    decision = Priced()(snapshot([view(D0), view(D1, depths=(50,))], []))
    assert (decision.decode, decision.source) == (D1, None)
    assert decision.forecast.cached_blocks == 50


def test_a_long_prefill_queue_makes_an_idle_decode_worker_compute_but_not_a_busy_one() -> None:
    def source(running: int) -> WorkerId | None:
        return Priced()(snapshot([view(D0, running=running)], [view(P0, queue_s=2.5)])).source

    assert source(running=0) is None
    assert source(running=30) == P0


def test_a_decode_worker_that_holds_everything_pulls_nothing() -> None:
    assert Priced()(snapshot([view(D0, depths=(100,))], [view(P0)])).source is None


def test_a_decode_worker_without_pages_is_avoided() -> None:
    full = view(D0, pages_free=10, pages_active=990, running=10)
    assert Priced()(snapshot([full, view(D1, running=12)], [view(P0)])).decode == D1


def test_among_equals_the_one_that_forgets_least_is_taken() -> None:
    crowded = view(D0, pages_free=0, pages_cached=1000)
    for draw in (0.0, 0.5, 0.99):
        decision = Priced()(snapshot([crowded, view(D1)], [view(P0)], draw=draw))
        assert decision.decode == D1
        assert decision.why is not None
        assert decision.why.damage_pages == 0


def test_among_equals_that_forget_nothing_the_one_with_least_to_compute_is_taken() -> None:
    for draw in (0.0, 0.5, 0.99):
        busier = view(D0, queued_tokens=1)
        decision = Priced()(snapshot([busier, view(D1)], [view(P0), view(P1, queued_tokens=1)], draw=draw))
        assert (decision.decode, decision.source) == (D1, P0)


def test_among_equals_that_forget_nothing_the_draw_decides() -> None:
    seen = Counter(
        Priced()(snapshot([view(D0), view(D1)], [view(P0), view(P1)], draw=step / 100)).decode for step in range(100)
    )
    assert seen == {D0: 50, D1: 50}


def test_requests_with_one_key_meet_and_other_keys_spread() -> None:
    def chosen(key: bytes, step: int) -> tuple[WorkerId | None, WorkerId]:
        workers = [view(D0), view(D1)], [view(P0, queued_tokens=step % 2), view(P1)]
        decision = Priced()(snapshot(*workers, draw=step / 10, cache_key=key))
        return decision.source, decision.decode

    keys = [f"key {number}".encode() for number in range(64)]
    assert all(len({chosen(key, step) for step in range(10)}) == 1 for key in keys)
    assert Counter(chosen(key, 0) for key in keys).keys() == {(p, d) for p in (P0, P1) for d in (D0, D1)}


def test_a_worker_that_leaves_moves_its_own_keys_alone() -> None:
    def source(key: bytes, workers: list[WorkerId]) -> WorkerId | None:
        return Priced()(snapshot([view(D0)], [view(worker) for worker in workers], cache_key=key)).source

    third = WorkerId("prefill-2")
    for key in (f"key {number}".encode() for number in range(32)):
        before = source(key, [P0, P1, third])
        assert before == third or source(key, [P0, P1]) == before


def test_a_key_outweighs_no_seconds() -> None:
    for key in (f"key {number}".encode() for number in range(16)):
        assert Priced()(snapshot([view(D0)], [view(P0), view(P1, depths=(80,))], cache_key=key)).source == P1
        assert Priced()(snapshot([view(D0, running=60), view(D1)], [view(P0)], cache_key=key)).decode == D1


def test_a_key_forgets_no_pages() -> None:
    crowded = view(D0, pages_free=0, pages_cached=1000)
    for key in (f"key {number}".encode() for number in range(16)):
        assert Priced()(snapshot([crowded, view(D1)], [view(P0)], cache_key=key)).decode == D1


def test_a_difference_beyond_the_tie_is_not_drawn() -> None:
    prices = Prices()
    slower = view(P1, cost=StepCost(step_s=0.02, prompt_token_s=0.001 * (1 + 4 * prices.tie_share)))
    for draw in (0.0, 0.99):
        decision = Priced()(snapshot([view(D0, running=4)], [view(P0), slower], tokens=16000, draw=draw))
        assert decision.source == P0


def test_the_breakdown_adds_up_to_the_price() -> None:
    why = Priced()(snapshot([view(D0, running=4)], [view(P0, queue_s=0.1)])).why
    assert why is not None
    parts = [getattr(why, name) for name in dataclasses.asdict(why) if name.endswith("_s")]
    assert why.total_s == pytest.approx(sum(parts))
    assert why.wait_s == pytest.approx(0.1)
    assert f"price_s={why.total_s:.4f}" in str(why)


def test_workers_that_never_prefilled_are_priced_like_the_others() -> None:
    unknown = view(P1, cost=StepCost(), depths=(50,))
    assert Priced()(snapshot([view(D0)], [view(P0), unknown])).source == P1


def test_of_many_workers_the_best_pair_is_found() -> None:
    prefill = [view(WorkerId(f"p{i}"), depths=(i,)) for i in range(40)]
    decode = [view(WorkerId(f"d{i}"), running=40 - i) for i in range(40)]
    decision = Priced()(snapshot(decode, prefill))
    assert (decision.decode, decision.source) == ("d39", "p39")


def test_round_robin_takes_turns_in_both_roles() -> None:
    choose = policy_named("round-robin")
    pairs = [choose(snapshot([view(D0), view(D1)], [view(P0), view(P1)], turn=turn)) for turn in range(4)]
    assert [(d.decode, d.source) for d in pairs] == [(D0, P0), (D1, P1), (D0, P0), (D1, P1)]


def test_random_draws_every_pair_equally() -> None:
    choose = policy_named("random")
    drawn = Counter(
        (d.decode, d.source)
        for step in range(400)
        for d in [choose(snapshot([view(D0), view(D1)], [view(P0), view(P1)], draw=step / 400))]
    )
    assert set(drawn.values()) == {100}
    assert len(drawn) == 4


def test_least_requests_counts_requests_and_then_tokens() -> None:
    choose = policy_named("least-requests")
    decode = [view(D0, requests=3), view(D1, requests=2, queued_tokens=900)]
    prefill = [view(P0, queued_tokens=10), view(P1, queued_tokens=5)]
    decision = choose(snapshot(decode, prefill))
    assert (decision.decode, decision.source) == (D1, P1)


def test_of_two_drawn_the_one_with_fewer_requests_is_taken() -> None:
    workers = [WorkerId(f"prefill-{number}") for number in range(4)]
    busy = [view(worker, requests=requests) for worker, requests in zip(workers, (9, 0, 5, 7), strict=True)]
    choose = policy_named("power-of-two")
    taken = Counter(choose(snapshot([view(D0)], busy, draw=step / 400)).source for step in range(400))
    assert taken[workers[0]] == 0, "whoever it is drawn with has fewer"
    assert taken[workers[1]] > taken[workers[2]] > taken[workers[3]] > 0


def test_least_tokens_does_not_count_requests() -> None:
    prefill = [view(P0, requests=1, queued_tokens=9), view(P1, requests=5)]
    assert policy_named("least-tokens")(snapshot([view(D0)], prefill)).source == P1


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_forecasts_what_it_chose(name: str) -> None:
    waits = [view(worker, queue_s=2.0, queued_tokens=2000, requests=1) for worker in (P0, P1)]
    decision = policy_named(name)(snapshot([view(D0), view(D1)], waits, turn=2, draw=0.4))
    assert decision.decode in (D0, D1)
    assert decision.forecast.first_token_s > 1.6


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_without_prefill_workers(name: str) -> None:
    decision = policy_named(name)(snapshot([view(D0)], [], draw=0.7, turn=3))
    assert (decision.decode, decision.source) == (D0, None)
