"""A run in the numbers by which policies are compared. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.values.worker_counts import LatencyTargets
from tools.simulate.fleet import results
from tools.simulate.fleet.results import SimulatedRun, Status, percentile
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.traces.oracle import oracle_rate
from tools.simulate.traces.trace import Trace
from tools.simulate.variants import BASELINE
from twostroke.config import Role
from twostroke.kv_cache.tier import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Shares are of 1, times in seconds; None where there is nothing to take it from."""

    variant: str
    rate_scale: float
    """Pace of the run, as a multiple of the trace's own."""
    requests_per_s: float
    requests: int
    completed: int
    refused: int
    lost: int
    """Expired or failed."""
    utilisation: float
    """Utilisation of prefill workers, or of decode workers where there are none."""
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    ttft_mean_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    itl_mean_s: float | None
    """Seconds per token after the first, averaged over answers."""
    hit_rate: float
    """Share of prompt tokens that were not computed."""
    oracle_share: float | None
    """The hit rate over the oracle's."""
    host_rate: float
    """Share of prompt tokens that came from workers' host memory."""
    disk_rate: float
    pulled_tokens: int
    """From peers."""
    goodput_per_s: float
    """Requests that were done, and in time where an objective is given."""
    p90_ratio: float | None
    """Over round-robin's at the same pace."""
    prediction_error: float | None
    """Median of |predicted over actual time to first token - 1|."""
    prediction_bias: float | None
    """Median of the same with its sign: above 0 the router expects too much."""
    decision_ms: float
    event_gaps: int
    snapshots: int
    divergences: int
    unequal_indexes: int
    cpu_s: float


def summarise(run: SimulatedRun, rate_scale: float, promise: LatencyTargets, oracle: float) -> Summary:
    """Summarises a run, without its ratio. The ratio takes another run: see `with_ratios`."""
    ttfts = results.ttfts(run)
    errors = results.prediction_errors(run.outcomes)
    hit_rate = results.token_hit_rate(run)
    has_prefill = any(use.role is Role.PREFILL for use in run.workers)
    return Summary(
        variant=run.policy,
        rate_scale=rate_scale,
        requests_per_s=len(run.outcomes) / run.span_s if run.span_s else 0.0,
        requests=len(run.outcomes),
        completed=len(run.of_status(Status.DONE)),
        refused=len(run.of_status(Status.REFUSED)),
        lost=len(run.of_status(Status.EXPIRED)) + len(run.of_status(Status.FAILED)),
        utilisation=results.utilisation(run, Role.PREFILL if has_prefill else Role.DECODE),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p90_s=percentile(ttfts, 0.9),
        ttft_p99_s=percentile(ttfts, 0.99),
        ttft_mean_s=_mean(ttfts),
        itl_p50_s=run.gaps.percentile(0.5),
        itl_p99_s=run.gaps.percentile(0.99),
        itl_mean_s=_mean([outcome.itl_mean_s for outcome in run.outcomes if outcome.itl_mean_s is not None]),
        hit_rate=hit_rate,
        oracle_share=hit_rate / oracle if oracle else None,
        host_rate=results.tier_hit_rate(run, Tier.HOST),
        disk_rate=results.tier_hit_rate(run, Tier.DISK),
        pulled_tokens=sum(outcome.pulled_tokens for outcome in run.outcomes),
        goodput_per_s=results.goodput(run, promise.ttft_s, promise.itl_s),
        p90_ratio=None,
        prediction_error=percentile([abs(error) for error in errors], 0.5),
        prediction_bias=percentile(errors, 0.5),
        decision_ms=1e3 * run.decision_cpu_s / run.decisions if run.decisions else 0.0,
        event_gaps=run.events.gaps,
        snapshots=run.events.snapshots,
        divergences=run.events.divergences,
        unequal_indexes=len(run.unequal_indexes),
        cpu_s=run.cpu_s,
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def with_ratios(summaries: Sequence[Summary]) -> list[Summary]:
    base = {each.rate_scale: each.ttft_p90_s for each in summaries if each.variant == BASELINE}
    return [
        dataclasses.replace(each, p90_ratio=_ratio(each.ttft_p90_s, base.get(each.rate_scale))) for each in summaries
    ]


def oracle_rate_of(trace: Trace, shape: FleetShape) -> float:
    """Returns the hit rate of one cache with the pages of all prefill workers (without any, of all decode workers)."""
    pages = shape.prefill * shape.prefill_pages or shape.decode * shape.decode_pages
    return oracle_rate(trace, pages)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
