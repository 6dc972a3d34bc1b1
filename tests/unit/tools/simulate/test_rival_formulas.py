"""The policies that ours is measured against: each formula in a plain example."""

from __future__ import annotations

import math
from typing import Any

import pytest

from router.routing.policies import POLICIES
from router.routing.policy import Decision, Policy, Snapshot, WorkerView
from tools.simulate.rivals import RIVALS
from tools.simulate.rivals.affinity import History, LlmdTokenAware, RayPrefixAffinity, SglangCacheAware
from tools.simulate.rivals.hashing import BOUND, choose_by_hash
from tools.simulate.rivals.linear import DynamoLinear, LMetric
from tools.simulate.rivals.seconds import MooncakeConductor, choose_earliest
from tools.simulate.variants import policy_of
from twostroke.base.ids import BlockHash, WorkerId
from twostroke.scheduler.cost import StepCost

P = [WorkerId(f"prefill-{i}") for i in range(4)]
D = [WorkerId(f"decode-{i}") for i in range(2)]
COST = StepCost(step_s=0.02, stream_s=0.0003, prompt_token_s=0.001)


def view(worker: WorkerId, **facts: Any) -> WorkerView:
    known: dict[str, Any] = {
        "pages_free": 1000,
        "cost": COST,
        "step_tokens": 512,
        "resident": facts.get("depths", (0,)),
    }
    return WorkerView(worker=worker, **(known | facts))


def hashes(count: int, chat: int = 0) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(bytes([chat, i]) * 8) for i in range(count))


def ask(prefill: list[WorkerView], chat: int = 0, **facts: Any) -> Snapshot:
    given: dict[str, Any] = {"known_tokens": 1608, "decode": (view(D[0]), view(D[1]))}
    return Snapshot(
        full_blocks=100, block_size=16, page_bytes=100_000, prefill=tuple(prefill), block_hashes=hashes(100, chat),
        **(given | facts),
    )  # fmt: skip


def source(policy: Policy, prefill: list[WorkerView], **facts: Any) -> WorkerId | None:
    return policy(ask(prefill, **facts)).source


def test_a_conversation_hashes_to_one_worker_and_conversations_to_all() -> None:
    idle = [view(worker) for worker in P]
    homes = {chat: source(choose_by_hash, idle, chat=chat) for chat in range(64)}
    assert all(source(choose_by_hash, idle, chat=chat, turn=chat) == home for chat, home in homes.items())
    assert set(homes.values()) == set(P)


def test_a_full_worker_is_passed_over_on_the_ring() -> None:
    home = source(choose_by_hash, [view(worker) for worker in P], chat=1)
    full = [view(worker, requests=20 if worker == home else 10) for worker in P]
    assert math.ceil(BOUND * 51 / 4) == 16
    assert source(choose_by_hash, full, chat=1) != home


def test_a_history_forgets_what_was_sent_longest_ago_leaves_first() -> None:
    history = History(most_blocks=150)
    history.send(P[0], hashes(100, chat=1))
    history.send(P[0], hashes(100, chat=2))
    assert history.matched(P[0], hashes(100, chat=2)) == 100
    assert history.matched(P[0], hashes(100, chat=1)) == 50
    assert history.matched(P[1], hashes(100, chat=1)) == 0


def test_sglang_goes_by_its_own_history_above_half() -> None:
    policy, idle = SglangCacheAware(), [view(P[0]), view(P[1])]
    first = source(policy, idle, turn=1)
    assert first == P[1]
    assert source(policy, idle, turn=0) == P[1], "all of it was sent there"
    half_known = ask(idle, turn=0, known_tokens=4000)
    assert policy(half_known).source == P[0], "1600 of 4000 tokens are less than half"


def test_sglang_balances_once_requests_are_far_apart() -> None:
    policy = SglangCacheAware()
    policy(ask([view(P[0]), view(P[1])], turn=1))
    assert source(policy, [view(P[0]), view(P[1], requests=32)]) == P[1]
    assert source(policy, [view(P[0]), view(P[1], requests=33)]) == P[0]


def test_ray_never_leaves_the_prefix_unless_told_when() -> None:
    never, sometimes = RayPrefixAffinity(), RayPrefixAffinity(imbalance=10)
    for policy in (never, sometimes):
        policy(ask([view(P[0]), view(P[1])], turn=1))
    uneven = [view(P[0]), view(P[1], requests=1000)]
    assert source(never, uneven) == P[1]
    assert source(sometimes, uneven) == P[0]


def test_ray_sends_what_it_does_not_know_to_the_smallest_tree() -> None:
    policy, idle = RayPrefixAffinity(), [view(P[0]), view(P[1])]
    homes = [source(policy, idle, chat=chat) for chat in range(4)]
    assert homes == [P[0], P[1], P[0], P[1]]


def test_llmd_is_sticky_until_the_gap_is_too_long() -> None:
    def chosen(queued: int) -> WorkerId | None:
        return source(LlmdTokenAware(), [view(P[0]), view(P[1], depths=(90,), queued_tokens=queued)])

    assert chosen(17_000) == P[1]
    assert chosen(19_000) == P[0]


def test_llmd_counts_tokens_where_nobody_holds_enough() -> None:
    less = view(P[1], depths=(50,), queued_tokens=700)
    assert source(LlmdTokenAware(), [view(P[0]), less]) == P[1], "700 + 804 against 1608"
    assert source(LlmdTokenAware(), [view(P[0], queued_tokens=0), view(P[1], depths=(50,), queued_tokens=900)]) == P[0]


def test_dynamo_adds_blocks_and_takes_the_credit_off() -> None:
    def chosen(policy: Policy, queued_blocks: int) -> WorkerId | None:
        return source(policy, [view(P[0]), view(P[1], depths=(40,), queued_tokens=16 * queued_blocks)])

    assert chosen(DynamoLinear(), 39) == P[1]
    assert chosen(DynamoLinear(), 41) == P[0]
    assert chosen(DynamoLinear(overlap=2.0), 79) == P[1]


def test_dynamo_discounts_lower_tiers() -> None:
    tiers = {"depths": (0, 40), "tier_page_s": (0.0, 0.001)}
    assert source(DynamoLinear(), [view(P[0]), view(P[1], queued_tokens=16 * 29, **tiers)]) == P[1]
    assert source(DynamoLinear(), [view(P[0]), view(P[1], queued_tokens=16 * 31, **tiers)]) == P[0]


def test_dynamo_decodes_where_fewest_blocks_are_in_use() -> None:
    decode = (view(D[0], pages_active=10), view(D[1], pages_active=9, depths=(0,)))
    assert DynamoLinear()(ask([view(P[0])], decode=decode)).decode == D[1]


def test_lmetric_multiplies_tokens_by_requests() -> None:
    half = {"depths": (50,)}
    assert source(LMetric(), [view(P[0], requests=1), view(P[1], requests=2, **half)]) == P[1]
    assert source(LMetric(), [view(P[0], requests=1), view(P[1], requests=3, **half)]) == P[0]


def test_mooncake_fetches_a_prefix_that_is_much_longer_elsewhere() -> None:
    def decided(own: int) -> Decision:
        busy = view(P[1], depths=(90,), queue_s=10.0)
        return MooncakeConductor(balancing=2.0)(ask([view(P[0], depths=(own,)), busy]))

    assert (decided(40).source, decided(40).peer, decided(40).peer_blocks) == (P[0], P[1], 90)
    assert (decided(60).source, decided(60).peer) == (P[0], None)


def test_greedy_counts_its_own_seconds_only() -> None:
    near_saturation = {"utilisation": 0.95}
    warm = view(P[1], depths=(50,), queue_s=0.9, **near_saturation)
    assert source(choose_earliest, [view(P[0], **near_saturation), warm]) == P[0]


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_forecasts_what_it_chose(name: str) -> None:
    waits = [view(worker, queue_s=2.0, queued_tokens=2000, requests=1) for worker in P]
    decision = policy_of(name)(ask(waits, turn=2, draw=0.4))
    assert decision.decode in D
    assert decision.forecast.first_token_s > 1.6


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_serves_without_prefill_workers(name: str) -> None:
    decision = policy_of(name)(ask([], decode=(view(D[0]),), draw=0.7, turn=3))
    assert (decision.decode, decision.source) == (D[0], None)


def test_no_router_serves_with_a_rival() -> None:
    assert not RIVALS.keys() & POLICIES.keys()
