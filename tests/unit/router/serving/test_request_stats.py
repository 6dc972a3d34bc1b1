"""What an answer was promised beside what it got."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from router.metrics import Comparison, RouterMetrics
from router.routing.policy import Breakdown, Decision, Forecast
from router.routing.selector import RoutingParams
from router.serving.parent_request import ParentRequest
from router.serving.request_stats import RequestStats
from twostroke.base.ids import BlockHash, RequestId, WorkerId
from twostroke.base.lifetime import Instant, Lifetime
from twostroke.request import GenerateRequest, SamplingParams

NAMES = tuple(BlockHash(bytes([number] * 16)) for number in range(6))


def account() -> RequestStats:
    lifetime = Lifetime(clock=iter(range(100, 200)).__next__)
    lifetime.mark(Instant.RECEIVED)
    wanted = GenerateRequest(prompt=tuple(range(100)), sampling=SamplingParams(seed=1, max_tokens=9))
    request = ParentRequest(request_id="r", request=wanted, routing=RoutingParams(tenant="alice", priority=1))
    stats = RequestStats(request_id=RequestId("r#0"), parent=request, block_hashes=NAMES, block_size=16, policy="kv")
    stats.lifetime = lifetime
    return stats


def decision(cached_blocks: int, prefill_s: float = 2.0, decode: str = "decode-0") -> Decision:
    return Decision(
        decode=WorkerId(decode),
        source=WorkerId("prefill-0"),
        peer=WorkerId("prefill-1"),
        peer_blocks=4,
        forecast=Forecast(prefill_s=prefill_s, tail_s=0.5, cached_blocks=cached_blocks),
        why=Breakdown(prefill_s=3.0),
    )


def test_reuse_and_first_token_stand_beside_their_predictions() -> None:
    told = account()
    assert told.comparison is None
    told.placed(decision(cached_blocks=5), decided_at_s=10.0)
    told.arrived(1, 48, now_s=13.0)
    assert told.comparison == Comparison(5, 3, 2.5, 3.0)


def test_the_last_word_of_the_first_attempt_on_reuse_counts_and_later_attempts_do_not() -> None:
    told = account()
    told.placed(decision(5), 10.0)
    told.arrived(1, 48, 13.0)
    told.arrived(0, 80, 14.0)
    told.placed(decision(6, decode="decode-1"), 15.0)
    told.arrived(2, 96, 16.0)
    assert told.cached_tokens == 80
    assert told.comparison == Comparison(5, 5, 2.5, 3.0)
    told.proposals = {"lookup": (8, 5), "model": (2, 0)}
    record = told.record("length")
    assert (record.drafted_tokens, record.kept_tokens) == ({"lookup": 8, "model": 2}, {"lookup": 5, "model": 0})
    assert (record.decode, record.attempts, record.output_tokens) == ("decode-1", 2, 3)


def test_what_came_before_the_attempt_that_answered_is_no_error_of_the_prediction() -> None:
    told = account()
    told.placed(decision(5), 10.0)
    told.placed(decision(2), 20.0)
    told.arrived(1, 32, 21.0)
    assert told.comparison == Comparison(2, 2, 2.5, None)


def test_a_record_says_what_was_decided_why_and_what_came_of_it() -> None:
    told = account()
    told.placed(decision(5), 10.0)
    for at_s in (13.0, 13.5, 15.5):
        told.arrived(1, 80, at_s)
    record = told.record("stop")
    assert (record.arrival_s, record.outcome, record.tenant, record.priority) == (100, "stop", "alice", 1)
    assert record.block_hashes == tuple(int.from_bytes(name[:8], "big") for name in NAMES)
    assert (record.decode, record.source, record.peer, record.peer_blocks) == ("decode-0", "prefill-0", "prefill-1", 4)
    assert record.forecast["prefill_s"] == 2.0
    assert record.price["prefill_s"] == 3.0
    assert (record.cached_tokens, record.predicted_cached_tokens) == (80, 80)
    assert (record.ttft_s, record.predicted_ttft_s) == (3.0, 2.5)
    assert (record.itl_mean_s, record.itl_max_s) == (1.25, 2.0)
    assert set(record.instants) == {"received", "first_token"}


def test_an_answer_that_was_never_placed_has_a_record_too() -> None:
    record = account().record("Overloaded")
    assert (record.attempts, record.decode, record.forecast, record.output_tokens) == (0, None, {}, 0)
    assert (record.ttft_s, record.predicted_ttft_s, record.predicted_cached_tokens, record.itl_mean_s) == (None,) * 4


@pytest.mark.parametrize(("predicted", "reused", "over", "under"), [(5, 3, 2, 0), (3, 5, 0, 2), (4, 4, 0, 0)])
def test_metrics_tell_reuse_that_did_not_come_from_reuse_that_nobody_expected(
    predicted: int, reused: int, over: int, under: int
) -> None:
    metrics = RouterMetrics()
    metrics.compare(Comparison(predicted, reused, 1.0, 1.2))
    assert value(metrics.registry, "predicted_reused_blocks_total") == predicted
    assert value(metrics.registry, "reused_blocks_total") == reused
    assert value(metrics.registry, "overpredicted_blocks_total") == over
    assert value(metrics.registry, "underpredicted_blocks_total") == under


def test_metrics_of_the_first_token_are_the_ratio_to_the_prediction_and_the_distance_from_it() -> None:
    metrics = RouterMetrics()
    for actual_s in (0.5, 1.2, None):
        metrics.compare(Comparison(0, 0, 1.0, actual_s))
    metrics.compare(Comparison(0, 0, 0.0, 1.0))  # nothing was known: no ratio
    registry = metrics.registry
    assert value(registry, "ttft_prediction_ratio_count") == 2
    assert value(registry, "ttft_prediction_ratio_sum") == pytest.approx(1.7)
    assert value(registry, "ttft_prediction_ratio_bucket", le="0.5") == 1
    assert value(registry, "ttft_prediction_error_seconds_count") == 3
    assert value(registry, "ttft_prediction_error_seconds_sum") == pytest.approx(0.5 + 0.2 + 1.0)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"twostroke_{name}", {"role": "router", **labels})
