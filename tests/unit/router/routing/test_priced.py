"""What the priced policy weighs against what: peers, tiers, wires, evictions, streams."""

from __future__ import annotations

import random
from typing import Any

import pytest

from router.fleet.worker import LinkRate
from router.routing.forecast import Forecaster, PrefixHolder, still_queued_s
from router.routing.policies.priced import Priced, Prices
from router.routing.policy import Decision, Snapshot, WorkerView
from twostroke.base.ids import WorkerId
from twostroke.kv_cache.form import KvForm
from twostroke.scheduler.cost import StepCost

P0, P1, P2, D0, D1 = (WorkerId(text) for text in ("prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1"))
COST = StepCost(step_s=0.02, stream_s=0.0003, prompt_token_s=0.001)
FAST, SLOW = LinkRate(0.001, 1e9), LinkRate(0.001, 2e6)


def view(worker: WorkerId, **facts: Any) -> WorkerView:
    known: dict[str, Any] = {"pages_free": 1000, "cost": COST, "step_tokens": 512, "step_target_s": 0.1}
    known["resident"] = facts.get("depths", (0,))
    return WorkerView(worker=worker, **(known | facts))


def snapshot(prefill: list[WorkerView], decode: list[WorkerView] | None = None, **facts: Any) -> Snapshot:
    given: dict[str, Any] = {"known_tokens": 1600, "full_blocks": 100, "block_size": 16, "page_bytes": 100_000}
    return Snapshot(prefill=tuple(prefill), decode=tuple(decode or [view(D0, running=60)]), **(given | facts))


def decide(*prefill: WorkerView, **facts: Any) -> Decision:
    return Priced()(snapshot(list(prefill), **facts))


def test_a_prefix_that_a_busy_worker_holds_is_fetched_from_it() -> None:
    decision = decide(view(P0, links={P1: FAST}), view(P1, depths=(90,), queue_s=5.0))
    assert (decision.source, decision.peer, decision.peer_blocks) == (P0, P1, 90)
    assert decision.forecast.cached_blocks == 90
    assert decision.forecast.fetch_s == pytest.approx(0.001 + 90 * 100_000 / 1e9)


BF16, INT8 = KvForm("bfloat16"), KvForm("int8", "bfloat16")
INT8_PREFILL, FROM_INT8 = KvForm("int8"), KvForm("bfloat16", "int8")


def test_a_holder_that_a_worker_cannot_fetch_from_hides_none_that_it_can() -> None:
    deeper = [view(each, kv_form=INT8, depths=(95,), running=60) for each in (D0, D1)]
    prefill = [view(P0, kv_form=BF16, links={P1: FAST}), view(P1, kv_form=BF16, depths=(90,), queue_s=5.0)]
    decision = Priced(Prices(computes_locally=False))(snapshot(prefill, deeper))
    assert (decision.source, decision.peer, decision.peer_blocks) == (P0, P1, 90)


def test_a_decode_worker_fetches_what_a_prefill_worker_of_another_form_holds() -> None:
    holder = view(P0, kv_form=BF16, depths=(90,), conversion_page_s=0.001, queue_s=9.0)
    decode = view(D0, kv_form=INT8, links={P0: FAST}, page_bytes=50_000)
    decision = Priced(Prices(computes_remotely=False))(snapshot([holder], [decode]))
    assert (decision.source, decision.peer) == (None, P0)
    assert decision.forecast.fetch_s == pytest.approx(0.001 + 90 * (0.001 + 50_000 / 1e9))


def test_converting_a_page_is_priced_where_forms_differ_and_nowhere_else() -> None:
    def transfer_s(form: KvForm, page_s: float) -> float:
        source = view(P0, kv_form=BF16, conversion_page_s=page_s, depths=(100,))
        decode = view(D0, kv_form=form, links={P0: FAST})
        forecaster = Forecaster(snapshot([source], [decode]))
        return forecaster.forecast(decode, forecaster.at_source(source), source).transfer_s

    assert transfer_s(INT8, 0.002) - transfer_s(INT8, 0.0) == pytest.approx(100 * 0.002)
    assert transfer_s(BF16, 0.002) == transfer_s(BF16, 0.0)


def test_a_page_is_priced_as_the_cheaper_end_converts_it() -> None:
    def fetch_s(puller_s: float, source_bytes: int | None = 50_000) -> float:
        holder = view(
            P0, kv_form=INT8_PREFILL, depths=(90,), conversion_page_s=0.002, queue_s=9.0, page_bytes=source_bytes
        )
        decode = view(D0, kv_form=FROM_INT8, links={P0: FAST}, page_bytes=100_000, conversion_page_s=puller_s)
        return Priced(Prices(computes_remotely=False))(snapshot([holder], [decode])).forecast.fetch_s

    at_source_s = pytest.approx(0.001 + 90 * (0.002 + 100_000 / 1e9))
    assert fetch_s(0.001) == pytest.approx(0.001 + 90 * (0.001 + 50_000 / 1e9))
    assert fetch_s(0.003) == at_source_s
    assert fetch_s(0.0) == at_source_s, "it converts nothing"
    assert fetch_s(0.001, None) == at_source_s, "nobody knows what would travel"


def test_conversions_that_take_longer_than_computing_are_not_asked_for() -> None:
    def peer(page_s: float) -> WorkerId | None:
        holder = view(P0, kv_form=BF16, depths=(90,), conversion_page_s=page_s, queue_s=9.0)
        decode = view(D0, kv_form=INT8, links={P0: FAST})
        return Priced(Prices(computes_remotely=False))(snapshot([holder], [decode])).peer

    assert (peer(0.001), peer(0.1)) == (P0, None)


def test_over_a_slow_wire_it_is_computed() -> None:
    decision = decide(view(P0, links={P1: SLOW}), view(P1, depths=(90,), queue_s=5.0))
    assert (decision.source, decision.peer) == (P0, None)


def test_a_wire_that_is_busy_is_waited_for_or_not_taken() -> None:
    holder = view(P1, depths=(90,), queue_s=5.0)
    assert decide(view(P0, links={P1: FAST}, fetch_wait_s=0.5), holder).peer == P1
    assert decide(view(P0, links={P1: FAST}, fetch_wait_s=1.5), holder).peer is None
    busy_holder = view(P1, depths=(90,), queue_s=5.0, serve_wait_s=1.5)
    assert decide(view(P0, links={P1: FAST}), busy_holder).peer is None


def test_of_workers_that_hold_as_much_the_one_that_others_ask_less_is_asked() -> None:
    asked, idle = view(P1, depths=(90,), queue_s=5.0, serve_wait_s=0.5), view(P2, depths=(90,), queue_s=5.0)
    for holders in ((asked, idle), (idle, asked)):
        assert decide(view(P0, links={P1: FAST, P2: FAST}), *holders).peer == P2


def test_a_link_that_nobody_has_measured_is_tried() -> None:
    def source(links: dict[WorkerId, LinkRate]) -> WorkerId | None:
        decode = view(D0, running=3, links=links)
        return Priced()(snapshot([view(P0)], [decode], page_bytes=100_000_000)).source

    assert source({P0: LinkRate(0.001, 1e9)}) is None, "the last chunk's pages would take three seconds"
    assert source({}) == P0, "else no pull would ever measure it"


def test_a_link_that_nobody_has_measured_is_tried_although_another_one_is_slow() -> None:
    links = {P1: LinkRate(0.001, 9e6), D1: LinkRate(0.001, 2e9)}
    decode = view(D0, running=3, links=links)
    asked = snapshot([view(P0), view(P1)], [decode], page_bytes=1_000_000)
    assert Priced()(asked).source == P0


def test_the_last_token_of_a_pulled_prompt_costs_what_a_stream_does() -> None:
    slow = StepCost(step_s=0.02, stream_s=0.0003, prompt_token_s=0.001, prompt_step_s=0.5)

    def tail_s(tokens: int) -> float:
        decode = view(D0, cost=slow)
        return Forecaster(snapshot([view(P0)], [decode], known_tokens=tokens)).tail_s(decode, pulls=True)

    assert tail_s(1600) == tail_s(1601) == pytest.approx(0.0203), "no prompt token runs besides"
    assert tail_s(1603) == pytest.approx(0.0203 + 0.5 + 2 * 0.001)


def test_fetching_overlaps_with_waiting() -> None:
    decision = decide(view(P0, links={P1: LinkRate(0.001, 2e7)}, queue_s=0.6), view(P1, depths=(90,), queue_s=5.0))
    assert decision.peer == P1
    assert decision.forecast.fetch_s > 0.4
    assert decision.why is not None
    assert decision.why.wait_s == pytest.approx(0.6)


def test_a_decode_worker_that_computes_may_fetch_too() -> None:
    busy = view(P0, queue_s=5.0)
    decode = [view(D0, links={D1: FAST}), view(D1, depths=(90,), running=60, pages_free=0)]
    decision = decide(busy, decode=decode)
    assert (decision.decode, decision.source, decision.peer) == (D0, None, D1)


def test_nobody_is_its_own_peer() -> None:
    decision = decide(view(P0, depths=(90,)), view(P1, queue_s=5.0))
    assert (decision.source, decision.peer) == (P0, None)


def test_who_holds_most_on_a_slow_disk_fetches_from_the_next_best_holder() -> None:
    holder = view(P1, depths=(0, 90), tier_page_s=(0.0, 0.0001), queue_s=9.0)
    slow = view(D0, depths=(10, 100), tier_page_s=(0.0, 0.1), links={P1: FAST})
    decision = Priced(Prices(computes_remotely=False))(snapshot([holder], [slow]))
    assert (decision.decode, decision.peer, decision.peer_blocks) == (D0, P1, 90)


def test_a_lower_tier_counts_by_the_time_it_takes_to_load() -> None:
    def cached(page_s: float) -> int:
        spilled = view(P0, depths=(10, 90), tier_page_s=(0.0, page_s))
        return decide(spilled).forecast.cached_blocks

    assert cached(page_s=0.001) == 90
    assert cached(page_s=0.1) == 10, "loading a page takes longer than computing its 16 tokens"


def test_loading_from_a_lower_tier_overlaps_with_waiting() -> None:
    spilled = view(P0, depths=(0, 100), tier_page_s=(0.0, 0.012), queue_s=3.0)
    way = Forecaster(snapshot([spilled])).at_source(spilled)
    assert (way.wait_s, way.prefill_s) == (3.0, 0.0)


def test_evictions_that_are_counted_cost_seconds() -> None:
    crowded, roomy = view(P0, depths=(50,), pages_free=0, pages_cached=1000), view(P1, depths=(40,))
    alone = Priced(Prices(pulls_from_peers=False))
    assert alone(snapshot([crowded, roomy], re_reference_rate=0.0)).source == P0
    assert alone(snapshot([crowded, roomy], re_reference_rate=0.5)).source == P1


def test_streams_are_spread_over_decode_workers() -> None:
    assert decide(view(P0), decode=[view(D0, running=9), view(D1, running=3)]).decode == D1


def test_a_stream_more_counts_the_less_the_farther_steps_are_below_their_target() -> None:
    near = decide(view(P0), decode=[view(D0, running=9, step_target_s=0.03), view(D1, step_target_s=0.03)])
    far = decide(view(P0), decode=[view(D0, running=9, step_target_s=3.0), view(D1, queue_s=0.5, step_target_s=3.0)])
    assert near.decode == D1
    assert far.decode == D0


def test_pulled_pages_wait_for_what_the_decode_worker_computes_before() -> None:
    busy = {"running": 9, "requests": 90}
    decision = decide(view(P0), decode=[view(D0, queue_s=1.0, **busy), view(D1, **busy)])
    assert decision.decode == D1
    assert decision.forecast.decode_queue_s == 0


def test_they_do_not_wait_for_whole_prompts_because_their_ends_run_before() -> None:
    source = view(P0)
    forecaster = Forecaster(snapshot([source]))
    one_prompt, many_ends = (
        forecaster.forecast(
            view(D0, queue_s=5.0, requests=requests), forecaster.at_source(source), source
        ).decode_queue_s
        for requests in (1, 300)
    )
    assert 0 < one_prompt <= COST.of_prompt(15, 0, 512) < many_ends


def test_the_sooner_pages_arrive_the_more_of_the_decode_queue_is_before_them() -> None:
    assert still_queued_s(0.0, 1.0) == 0
    assert still_queued_s(2.0, 0.0) == 2.0
    assert 2.0 > still_queued_s(2.0, 0.5) > still_queued_s(2.0, 5.0) > 0


def test_always_remote_and_always_local_are_the_same_policy_with_fewer_candidates() -> None:
    waits = snapshot([view(P0, queue_s=5.0)], [view(D0)])
    assert Priced(Prices(computes_locally=False))(waits).source == P0
    assert Priced(Prices(computes_remotely=False))(waits).source is None
    idle = snapshot([view(P0)], [view(D0, running=30)])
    assert Priced(Prices(computes_remotely=False))(idle).source is None


def test_always_local_still_works_without_anything_else() -> None:
    alone = snapshot([], [view(D0)])
    assert Priced(Prices(computes_locally=False))(alone).decode == D0


def test_the_longest_prefix_is_forecast_once_however_it_comes() -> None:
    forecaster = Forecaster(snapshot([view(P0)]))
    own = forecaster.at_source(view(P0, depths=(60,)))
    fetched = forecaster.at_source(view(P0, depths=(20,)), PrefixHolder(view(P1, depths=(60,)), 60))
    assert (own.prefill_s, own.computed_tokens) == (fetched.prefill_s, fetched.computed_tokens)
    assert fetched.fetch_s > own.fetch_s == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_the_shortlist_finds_what_pricing_every_pair_finds(seed: int) -> None:
    draws = random.Random(seed)

    def drawn(worker: str) -> WorkerView:
        return view(
            WorkerId(worker),
            depths=(draws.choice((0, 0, 10, 50, 100)),),
            queue_s=draws.expovariate(1.0),
            running=draws.randrange(20),
            pages_free=draws.choice((0, 500)),
            pages_cached=500,
            utilisation=draws.random() * 0.9,
        )

    some = snapshot([drawn(f"p{i}") for i in range(12)], [drawn(f"d{i}") for i in range(12)], draw=draws.random())
    short, whole = (Priced(Prices(shortlist=count))(some).why for count in (Prices().shortlist, 100))
    assert short is not None
    assert whole is not None
    assert short.total_s <= 1.03 * whole.total_s + Prices().tie_s


def test_blocks_that_are_still_coming_cannot_be_fetched() -> None:
    coming = view(P1, depths=(90,), resident=(0,), queue_s=5.0)
    assert decide(view(P0, links={P1: FAST}), coming).peer is None


def test_a_peer_that_has_to_load_what_it_sends_is_priced_by_the_load() -> None:
    def peer(page_s: float) -> WorkerId | None:
        return decide(view(P0, links={P1: FAST}), view(P1, depths=(0, 90), tier_page_s=(0.0, page_s), queue_s=5.0)).peer

    assert peer(page_s=0.001) == P1
    assert peer(page_s=0.1) is None, "loading a page takes longer than computing its 16 tokens"


def test_a_peer_with_less_in_memory_beats_one_with_more_on_a_slow_disk() -> None:
    busy = {"queue_s": 5.0, "pages_free": 0}
    slow = view(P1, depths=(0, 0, 90), tier_page_s=(0.0, 0.0, 0.1), **busy)
    memory = view(D1, depths=(80,), running=60, **busy)
    decision = decide(view(P0, links={P1: FAST, D1: FAST}), slow, decode=[view(D0, running=30), memory])
    assert (decision.peer, decision.peer_blocks) == (D1, 80)


def test_a_prompt_on_a_disk_goes_where_the_disk_is() -> None:
    on_disk = view(D0, depths=(0, 0, 100), tier_page_s=(0.0, 0.0, 0.001))
    decision = decide(view(P0), decode=[on_disk, view(D1)])
    assert (decision.decode, decision.source) == (D0, None)
    assert decision.forecast.fetch_s == pytest.approx(0.1)


def test_what_a_decode_worker_loads_beside_a_pull_is_waited_for_or_pulled_too() -> None:
    source = view(P0, depths=(100,))

    def transferred(page_s: float) -> tuple[int, float]:
        decode = view(D0, links={P0: FAST}, depths=(0, 50), tier_page_s=(0.0, page_s))
        forecaster = Forecaster(snapshot([source], [decode]))
        forecast = forecaster.forecast(decode, forecaster.at_source(source), source)
        return forecast.pulled_blocks, forecast.transfer_s

    assert transferred(page_s=1e-5) == (50, pytest.approx(0.006))
    assert transferred(page_s=1e-4) == (50, pytest.approx(0.006)), "loads and pulls at the same time"
    assert transferred(page_s=0.1) == (100, pytest.approx(0.011)), "the wire is faster than the disk"


def test_blocks_on_a_lower_tier_take_pages_like_missing_ones() -> None:
    full = {"pages_free": 10, "pages_active": 990, "slots": 64, "running": 8}
    forecaster = Forecaster(snapshot([], [view(D0)]))
    on_device = view(D0, depths=(100, 100), tier_page_s=(0.0, 0.001), **full)
    on_disk = view(D1, depths=(0, 100), tier_page_s=(0.0, 0.001), **full)
    waits = [
        forecaster.forecast(decode, forecaster.at_decode(decode), None).admission_s for decode in (on_device, on_disk)
    ]
    assert waits[0] == 0 < waits[1]


def test_what_no_worker_would_load_is_not_waited_for_even_while_the_queue_drains() -> None:
    spilled = view(P0, depths=(0, 90), tier_page_s=(0.0, 0.02), queue_s=5.0)
    way = Forecaster(snapshot([spilled])).at_source(spilled)
    assert (way.cached_blocks, way.fetch_s) == (0, 0.0)
    assert decide(view(P1, links={P0: FAST}, queue_s=4.0), spilled).peer is None


def test_loads_for_earlier_requests_are_waited_for() -> None:
    def cached(load_wait_s: float) -> int:
        spilled = view(P0, depths=(0, 90), tier_page_s=(0.0, 0.001), load_wait_s=load_wait_s)
        return decide(spilled).forecast.cached_blocks

    assert cached(load_wait_s=0.5) == 90
    assert cached(load_wait_s=2.0) == 0


def test_a_decode_worker_that_has_compiled_the_grammar_is_cheaper_by_the_compilation() -> None:
    decode = [view(D0, compile_s=0.4), view(D1)]
    decision = Priced()(snapshot([view(P0)], decode, known_tokens=15, full_blocks=0))
    assert decision.decode == D1
    only = Priced()(snapshot([view(P0)], decode[:1], known_tokens=15, full_blocks=0))
    assert only.why is not None
    assert decision.why is not None
    assert only.why.wait_s - decision.why.wait_s == pytest.approx(0.4)
    assert only.forecast.first_token_s - decision.forecast.first_token_s == pytest.approx(0.4)


def test_masks_lengthen_the_first_step_and_delay_the_streams_beside() -> None:
    free, masked = (
        Priced()(snapshot([], [view(D0, running=10)], output_tokens=100, mask_s=mask_s)) for mask_s in (0.0, 0.01)
    )
    assert masked.forecast.tail_s - free.forecast.tail_s == pytest.approx(1.5 * 0.01)
    assert free.why is not None
    assert masked.why is not None
    assert masked.why.harm_s > free.why.harm_s


def test_outputs_that_take_fewer_steps_free_their_slots_sooner_and_are_delayed_less() -> None:
    full = {"running": 8, "slots": 8, "slots_taken": 8}
    views = [view(D0, **full), view(D0, **full, step_tokens_each=2.0)]
    waits_s, harms_s = [], []
    for decode in views:
        forecaster = Forecaster(snapshot([], [decode], output_tokens=100))
        waits_s.append(forecaster.admission_s(decode, 1))
        why = decide(view(P0), decode=[decode], output_tokens=100).why
        assert why is not None
        harms_s.append(why.harm_s)
    assert waits_s[1] == pytest.approx(waits_s[0] / 2)
    assert harms_s[1] == pytest.approx(harms_s[0] / 2)


@pytest.mark.parametrize(("utilisation", "price"), [(0.0, 1.0), (0.5, 2.0), (0.9, 10.0), (1.0, 20.0)])
def test_a_second_of_prefill_costs_the_more_the_busier_prefill_workers_are(utilisation: float, price: float) -> None:
    decision = decide(view(P0), prefill_utilisation=utilisation)
    assert decision.source == P0
    assert decision.why.prefill_s == pytest.approx(price * decision.forecast.prefill_s)


def test_a_prompt_is_computed_where_workers_have_time_rather_than_where_it_would_delay_others() -> None:
    """The decode worker alone is slower at it: its streams are delayed by the prompt."""

    def computed_at(utilisation: float) -> WorkerId:
        return decide(view(P0), decode=[view(D0, running=1)], prefill_utilisation=utilisation).computed_by

    assert (computed_at(0.1), computed_at(0.9)) == (P0, D0)
