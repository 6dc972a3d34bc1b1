"""Look, choose, reserve: what one decision changes for the next one."""

from __future__ import annotations

import pytest

from router.admission.queued_request import QueuedRequest
from router.fleet.worker import Worker
from router.routing.policies import policy_named
from router.routing.policy import Policy
from router.routing.prefix_index import PrefixIndex
from router.routing.reservations import Reservations
from router.routing.selector import Selector, Shape, Workers
from tests.unit.router.queued import queued_request
from twostroke.base.ids import BlockHash, Epoch, RequestId, WorkerId
from twostroke.config import Role
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.form import KvForm
from twostroke.kv_cache.tier import Tier
from twostroke.request import Grammar, SamplingParams, WeightsRef
from twostroke.rpc.v1.control_pb2 import (
    TIER_DISK,
    TIER_HOST,
    WORKER_STATE_SERVING,
    LinkRate,
    Load,
    StepCosts,
    TierRate,
)

P = [WorkerId(f"prefill-{i}") for i in range(2)]
D = [WorkerId(f"decode-{i}") for i in range(2)]
EPOCH = Epoch(1, 7)
SHAPE = Shape(block_size=16, page_bytes=100_000)
NAMES = tuple(BlockHash(bytes([number]) * 16) for number in range(100))
COSTS = StepCosts(step_s=0.02, stream_s=0.0003, prompt_token_s=0.001, step_tokens=512, step_target_s=0.1)


class Desk:
    """Two workers of each role, a selector, and what it goes by."""

    def __init__(self, policy: str | Policy = "kv") -> None:
        self.index, self.reservations = PrefixIndex(), Reservations()
        chosen = policy_named(policy) if isinstance(policy, str) else policy
        self.selector = Selector(chosen, self.index, self.reservations, seed=1)
        self.logs = {worker: EventLog(EPOCH) for worker in (*P, *D)}
        self.by_id = {
            worker: Worker(worker, role, "", EPOCH, WORKER_STATE_SERVING)
            for role, workers in ((Role.PREFILL, P), (Role.DECODE, D))
            for worker in workers
        }
        for worker, log in self.logs.items():
            self.index.apply(worker, EPOCH, log.snapshot())
            self.report(worker, running=40 if worker in D else 0)

    def report(self, worker: WorkerId, **load: object) -> None:
        links = [LinkRate(worker_id=peer, latency_s=0.001, bytes_per_s=1e8) for peer in P if peer != worker]
        known = {"pages_free": 1000, "pages_total": 1000}
        self.by_id[worker].report(Load(costs=COSTS, links=links, **(known | load)), 0.0)  # type: ignore[arg-type]

    def hold(self, worker: WorkerId, count: int, tier: Tier = Tier.DEVICE) -> None:
        for name in NAMES[:count]:
            self.logs[worker].stored(name, tier)
        self.index.apply(worker, EPOCH, self.logs[worker].publish())

    def forget(self, worker: WorkerId, hashes: tuple[BlockHash, ...]) -> None:
        for name in hashes:
            self.logs[worker].removed(name)
        self.index.apply(worker, EPOCH, self.logs[worker].publish())

    def ask(self, number: int = 0, tokens: int = 1600, *, shares: bool = True, **fields) -> QueuedRequest:
        own = tuple(BlockHash(bytes([255, number, place]) * 5 + b".") for place in range(100))
        hashes = (NAMES if shares else own)[: tokens // 16]
        return queued_request(f"r{number}", tokens, hashes, 500, **fields)

    def workers(self) -> Workers:
        return Workers(SHAPE, [self.by_id[w] for w in D], [self.by_id[w] for w in P])

    def select(self, number: int = 0, *, shares: bool = True) -> tuple[WorkerId | None, WorkerId | None]:
        decision = self.selector.select(self.ask(number, shares=shares), self.workers(), 0.0)
        return decision.source, decision.peer


def test_what_is_placed_counts_for_the_next_decision() -> None:
    desk = Desk("least-requests")
    assert [desk.select(number, shares=False)[0] for number in range(4)] == [P[0], P[1], P[0], P[1]]


def test_the_policy_sees_the_requests_cache_key() -> None:
    desk = Desk("kv")
    keyed = desk.ask(cache_key=b"k")
    assert desk.selector.snapshot(keyed, desk.workers(), 0.0).cache_key == b"k"


def test_a_request_for_exact_pages_is_computed_where_they_are_not_converted() -> None:
    for decode, sources in (("int8", set()), ("bfloat16", set(P))):
        desk = Desk("round-robin")
        for worker in P:
            desk.by_id[worker].kv_form = KvForm("bfloat16")
        for worker in D:
            desk.by_id[worker].kv_form = KvForm(decode, None if sources else "bfloat16")
        exact = desk.ask(takes_converted=False)
        seen = desk.selector.snapshot(exact, desk.workers(), 0.0)
        assert {view.worker for view in seen.prefill} == sources
        assert desk.selector.select(exact, desk.workers(), 0.0).source in (sources or {None})
        assert desk.select(1)[0] in P


def test_prefixes_come_only_from_peers_whose_pages_may_become_the_own() -> None:
    """A prefill worker cannot use converted pages; a decode worker can use what a prefill worker has."""
    for holder, takers in ((D[0], {D[1]}), (P[0], {P[1], D[0], D[1]})):
        desk = Desk()
        for worker in P:
            desk.by_id[worker].kv_form = KvForm("bfloat16")
        for worker in D:
            desk.by_id[worker].kv_form = KvForm("int8", "bfloat16")
        desk.hold(holder, 90)
        snapshot = desk.selector.snapshot(desk.ask(), desk.workers(), 0.0)
        views = {view.worker: view for view in (*snapshot.prefill, *snapshot.decode)}
        assert {worker for worker in views if views[worker].kv_form.takes(views[holder].kv_form)} - {holder} == takers
        for number in range(8):
            decision = desk.selector.select(desk.ask(number), desk.workers(), 0.0)
            assert decision.peer is None or decision.computed_by in takers


def test_reserved_seconds_are_in_the_queue_until_they_end() -> None:
    desk = Desk("round-robin")
    desk.select()
    view = desk.selector.snapshot(desk.ask(1), desk.workers(), 0.0).prefill[0]
    assert 1.5 < view.queue_s < 1.7
    desk.reservations.end(RequestId("r0"))
    assert desk.selector.snapshot(desk.ask(1), desk.workers(), 0.0).prefill[0].queue_s == 0.0


def test_a_reported_queue_drains_while_no_report_comes() -> None:
    desk = Desk()
    desk.report(P[0], queued_s=3.0)
    assert desk.selector.snapshot(desk.ask(), desk.workers(), 1.0).prefill[0].queue_s == 2.0
    assert desk.selector.snapshot(desk.ask(), desk.workers(), 9.0).prefill[0].queue_s == 0.0


def test_siblings_of_a_burst_go_where_their_prefix_is_on_its_way() -> None:
    desk = Desk()
    homes = {desk.select(number)[0] for number in range(6)}
    assert len(homes) == 1


def test_a_prefix_on_its_way_is_not_resident() -> None:
    desk = Desk("round-robin")
    desk.select()
    view = desk.selector.snapshot(desk.ask(1), desk.workers(), 0.0).prefill[0]
    assert (view.cached_blocks, view.resident_blocks) == (100, 0)


def test_fetches_of_one_worker_share_its_wire() -> None:
    desk = Desk()
    desk.hold(P[0], 50)
    desk.report(P[0], queued_s=60.0)
    assert desk.select(0) == (P[1], P[0])
    views = desk.selector.snapshot(desk.ask(1), desk.workers(), 0.0).prefill
    page_s = 100_000 / 1e8
    assert abs(views[1].fetch_wait_s - 50 * page_s) < 1e-9
    assert views[0].serve_wait_s == views[1].fetch_wait_s
    later = desk.selector.snapshot(desk.ask(1), desk.workers(), 50 * page_s).prefill
    assert later[1].fetch_wait_s < 1e-9


def test_depths_reach_down_to_the_lowest_tier_of_the_worker() -> None:
    desk = Desk()
    desk.hold(P[0], 30)
    desk.forget(P[0], NAMES[20:30])
    desk.hold(P[0], 0)
    for name in NAMES[20:60]:
        desk.logs[P[0]].stored(name, Tier.HOST)
    desk.index.apply(P[0], EPOCH, desk.logs[P[0]].publish())
    desk.by_id[P[0]].report(Load(costs=COSTS, tiers=[TierRate(tier=TIER_HOST, page_s=0.002)]), 0.0)
    view = desk.selector.snapshot(desk.ask(), desk.workers(), 0.0).prefill[0]
    assert (view.depths, view.tier_page_s, view.resident) == ((20, 60), (0.0, 0.002), (20, 60))


def test_a_prompt_that_lies_on_a_disk_alone_goes_there_and_takes_pages_there() -> None:
    desk = Desk()
    desk.hold(P[1], 100, Tier.DISK)
    desk.by_id[P[1]].report(Load(costs=COSTS, pages_free=1000, tiers=[TierRate(tier=TIER_DISK, page_s=0.0005)]), 0.0)
    view = desk.selector.snapshot(desk.ask(), desk.workers(), 0.0).prefill[1]
    assert (view.depths, view.tier_page_s) == ((0, 0, 100), (0.0, 0.0, 0.0005))
    assert view.load_s(60) == pytest.approx(0.03)
    decision = desk.selector.select(desk.ask(), desk.workers(), 0.0)
    assert (decision.source, decision.peer) == (P[1], None)
    assert decision.forecast.cached_blocks == 100
    assert desk.reservations.on(P[1]).pages == 100
    later = desk.selector.snapshot(desk.ask(1), desk.workers(), 0.02).prefill[1]
    assert later.load_wait_s == pytest.approx(0.03), "its reader is busy with what the first request loads"


def test_evicted_blocks_that_are_asked_for_are_counted() -> None:
    desk = Desk()
    desk.hold(P[0], 100)
    desk.forget(P[0], NAMES[50:])
    desk.select(0)
    assert desk.index.re_reference.rate == 1.0
    assert desk.selector.snapshot(desk.ask(1), desk.workers(), 0.0).re_reference_rate == 1.0


def test_what_another_still_holds_is_not_counted() -> None:
    desk = Desk()
    desk.hold(P[0], 100)
    desk.hold(D[0], 100)
    desk.forget(P[0], NAMES[50:])
    desk.select(0)
    assert desk.index.re_reference.rate == 0.0


def test_answers_are_expected_to_be_as_long_as_the_last_ones() -> None:
    desk = Desk()
    assert desk.selector.snapshot(desk.ask(), desk.workers(), 0.0).output_tokens == 500
    for _ in range(300):
        desk.selector.ended(100)
    assert desk.selector.snapshot(desk.ask(), desk.workers(), 0.0).output_tokens == 100


def test_a_bias_of_the_forecast_is_learned_and_does_not_add_up() -> None:
    desk = Desk("round-robin")
    for number in range(200):
        decision = desk.selector.select(desk.ask(number), desk.workers(), 0.0)
        desk.reservations.end(RequestId(f"r{number}"))
        desk.selector.had_first_token(decision, decision.forecast.foreseen_s + 0.25, 0.0)
    forecast = desk.selector.select(desk.ask(), desk.workers(), 0.0).forecast
    assert abs(forecast.residual_s - 0.25) < 1e-9
    assert forecast.first_token_s == forecast.foreseen_s + forecast.residual_s


def test_wires_of_workers_that_are_gone_are_forgotten() -> None:
    desk = Desk("round-robin")
    for number in range(50):
        prefill, decode = WorkerId(f"prefill-{number}"), WorkerId(f"decode-{number}")
        workers = [
            Worker(worker, role, "", EPOCH, WORKER_STATE_SERVING)
            for worker, role in ((decode, Role.DECODE), (prefill, Role.PREFILL))
        ]
        decision = desk.selector.select(desk.ask(number), Workers(SHAPE, workers[:1], workers[1:]), 1000.0 * number)
        assert decision.source == prefill
    assert len(desk.selector._fetching_until_s) <= 5


def test_pulls_occupy_a_source_for_as_long_as_it_converts() -> None:
    """So that the next request's forecast waits for it."""

    def serve_wait_s(form: KvForm) -> float:
        desk = Desk("round-robin")
        for worker in D:
            desk.by_id[worker].kv_form = form
        for worker in P:
            desk.by_id[worker].kv_form = KvForm("bfloat16")
            desk.report(worker, conversion_page_s=0.01)
        desk.select(0)
        seen = desk.selector.snapshot(desk.ask(1), desk.workers(), 0.0)
        return max(view.serve_wait_s for view in seen.prefill)

    same_s, converted_s = serve_wait_s(KvForm("bfloat16")), serve_wait_s(KvForm("int8", "bfloat16"))
    assert converted_s - same_s == pytest.approx(0.01 * len(NAMES))


def test_a_worker_that_has_to_load_the_adapter_costs_the_time_that_takes() -> None:
    desk, adapter = Desk(), WeightsRef(b"a" * 16, "/loras/a")
    desk.report(D[0], running=40, weights_load_s=0.5, weights=[b"b" * 16])
    desk.report(D[1], running=40, weights_load_s=0.5, weights=[adapter.digest])
    desk.report(P[0], weights_load_s=0.25)
    with_adapter = desk.ask(shares=False, weights=adapter, needs_setup=True)
    for asked, extra_s in ((desk.ask(shares=False), 0.0), (with_adapter, 0.5)):
        seen = desk.selector.snapshot(asked, desk.workers(), 0.0)
        by_worker = {view.worker: view.queue_s for view in (*seen.decode, *seen.prefill)}
        assert by_worker[D[0]] - by_worker[D[1]] == pytest.approx(extra_s)
        assert by_worker[P[0]] - by_worker[P[1]] == pytest.approx(extra_s / 2), (
            "one that has not measured it costs nothing"
        )
    assert {desk.selector.select(with_adapter, desk.workers(), 0.0).decode for _ in range(8)} == {D[1]}


def test_a_worker_compiles_a_grammar_once_until_it_starts_anew() -> None:
    desk = Desk("least-requests")
    sampling = SamplingParams(seed=0, max_tokens=500, grammar=Grammar("start: /a/"))
    wants = desk.ask(sampling=sampling, needs_setup=True, compile_s=0.3, mask_s=0.001)

    def compile_s() -> dict[WorkerId, float]:
        seen = desk.selector.snapshot(wants, desk.workers(), 0.0)
        assert seen.mask_s == 0.001
        return {each.worker: each.compile_s for each in seen.decode}

    assert set(compile_s().values()) == {0.3}
    chosen = desk.selector.select(wants, desk.workers(), 0.0).decode
    assert compile_s() == {worker: 0.0 if worker == chosen else 0.3 for worker in D}
    assert desk.selector.snapshot(desk.ask(), desk.workers(), 0.0).mask_s == 0
    desk.by_id[chosen].epoch = Epoch(EPOCH.incarnation + 1, 5)
    assert compile_s()[chosen] == 0.3


def test_a_request_that_computes_all_finds_nothing_in_caches_and_asks_no_page_source() -> None:
    desk = Desk()
    for worker in (*P, D[1]):
        desk.hold(worker, 90)
    whole = desk.ask(sampling=SamplingParams(seed=0, max_tokens=500, prompt_logprobs=0))
    decision = desk.selector.select(whole, desk.workers(), 0.0)
    assert (decision.source, decision.peer) == (None, None)
    assert decision.forecast.cached_blocks == 0
    assert decision.forecast.computed_tokens == whole.attempt.known_tokens
    assert desk.selector.select(desk.ask(1), desk.workers(), 0.0).forecast.cached_blocks == 90
