"""What a simulated run was: one outcome per request, one use per worker, and what can be read off them."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from twostroke.config import Role
from twostroke.kv_cache.tier import Tier

GAP_RESOLUTION = 1.02
"""Factor between two bounds of the histogram of gaps between tokens: percentiles are right within 2 %."""
LEAST_GAP_S = 1e-5


class Status(enum.StrEnum):
    DONE = "done"
    REFUSED = "refused"
    """Nobody took it: the fleet is full, or it would have missed its limit."""
    EXPIRED = "expired"
    """The request's deadline passed."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """How one request fared. Instants are seconds of virtual time since the run began."""

    index: int
    """Number of the request among those simulated."""
    status: Status
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    """Emitted."""
    ttft_s: float | None = None
    """From arrival to the client having the first token; None where none came."""
    finished_s: float | None = None
    """The client had the last token, or the refusal."""
    itl_mean_s: float | None = None
    """Between tokens; None below two."""
    itl_max_s: float | None = None
    cached_tokens: int = 0
    """Prompt tokens not computed for this request: found at the decode worker, its page source, or a peer."""
    pulled_tokens: int = 0
    """Cached tokens that the computing worker fetched from a peer."""
    predicted_ttft_s: float | None = None
    """From the decision on, as the router expected it; None where its first attempt was lost."""
    decided_s: float | None = None
    """When the router chose, the last time."""
    decode: str | None = None
    source: str | None = None
    """None: the decode worker computed."""
    peer: str | None = None
    attempts: int = 0
    """Decode workers that it was given to."""
    tenant: str = ""
    priority: int = 0
    retry_after_s: float | None = None
    """Seconds after which a refused client may try again."""

    @property
    def since_decision_s(self) -> float | None:
        """What `predicted_ttft_s` predicts."""
        if self.ttft_s is None or self.decided_s is None:
            return None
        return self.arrived_s + self.ttft_s - self.decided_s


@dataclass(frozen=True, slots=True)
class Gaps:
    """How often which time lay between two tokens of an answer, over all answers of a run."""

    counts: Mapping[int, int] = field(default_factory=dict)
    """Bucket -> tokens; see `bucket_of`."""

    @staticmethod
    def bucket_of(gap_s: float) -> int:
        return max(0, math.ceil(math.log(max(gap_s, LEAST_GAP_S) / LEAST_GAP_S) / math.log(GAP_RESOLUTION)))

    @property
    def tokens(self) -> int:
        return sum(self.counts.values())

    def percentile(self, share: float) -> float | None:
        """Returns upper bound of the bucket in which this share of the gaps ends; None without any."""
        left = share * self.tokens
        for bucket, count in sorted(self.counts.items()):
            left -= count
            if left <= 0:
                return LEAST_GAP_S * GAP_RESOLUTION**bucket
        return None


@dataclass(slots=True, kw_only=True)
class WorkerUse:
    """What one worker has done, over all of its epochs."""

    worker: str
    role: Role
    busy_s: float = 0.0
    """Seconds in steps, of whatever kind."""
    prefill_s: float = 0.0
    """Busy seconds that were spent on prompt tokens."""
    prefill_span_s: float = 0.0
    """Busy seconds spent on prompt tokens before the last request arrived. After that the run fades out."""
    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens that were computed."""
    output_tokens: int = 0
    """Tokens that became known."""
    pulled_pages: int = 0
    served_pages: int = 0
    evicted_pages: int = 0
    loaded_tokens: dict[Tier, int] = field(default_factory=lambda: {Tier.HOST: 0, Tier.DISK: 0})
    """Tokens of pages that were loaded from lower tiers and used, by tier."""
    preemptions: int = 0
    epochs: int = 0
    pages: int = 0
    pages_cached: int = 0
    """Cached pages at the end."""


@dataclass(slots=True, kw_only=True)
class EventUse:
    """How the routers' indexes were kept."""

    batches: int = 0
    """Delivered, over all routers."""
    gaps: int = 0
    snapshots: int = 0
    divergences: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    policy: str
    outcomes: tuple[RequestOutcome, ...]
    workers: tuple[WorkerUse, ...]
    events: EventUse
    gaps: Gaps
    span_s: float
    """From the first arrival to the last."""
    duration_s: float
    """From the first arrival to the last end."""
    decisions: int
    """Requests decided, each as often as it was placed."""
    decision_cpu_s: float
    """Over all decisions, those about held requests included."""
    cpu_s: float
    """Processor seconds of the whole run, decisions included."""
    unequal_indexes: tuple[str, ...] = ()
    """Router and worker, where a router's index was not the worker's set at the end."""
    worker_s: float = 0.0
    """Workers that there were, each for as long as it was there, until the last answer."""
    scalings: int = 0
    """Times that their number changed."""

    def of_status(self, status: Status) -> tuple[RequestOutcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status is status)


def percentile(values: Iterable[float], share: float) -> float | None:
    """Returns the value below which this share of them lies, interpolated; None without any."""
    listed = list(values)
    return float(np.quantile(listed, share)) if listed else None


def ttfts(run: SimulatedRun) -> list[float]:
    return [outcome.ttft_s for outcome in run.outcomes if outcome.ttft_s is not None]


def utilisation(run: SimulatedRun, role: Role = Role.PREFILL) -> float:
    """Returns share of the time between first and last arrival that workers of a role spent on prompt tokens."""
    uses = [use for use in run.workers if use.role is role]
    return sum(use.prefill_span_s for use in uses) / (len(uses) * run.span_s) if uses and run.span_s else 0.0


def token_hit_rate(run: SimulatedRun) -> float:
    """Returns prompt tokens that were not computed, of those of answered requests."""
    answered = [outcome for outcome in run.outcomes if outcome.ttft_s is not None]
    asked = sum(outcome.prompt_tokens for outcome in answered)
    return sum(outcome.cached_tokens for outcome in answered) / asked if asked else 0.0


def tier_hit_rate(run: SimulatedRun, tier: Tier) -> float:
    """Tokens that a lower tier brought up, over prompt tokens of answered requests."""
    asked = sum(outcome.prompt_tokens for outcome in run.outcomes if outcome.ttft_s is not None)
    return sum(use.loaded_tokens[tier] for use in run.workers) / asked if asked else 0.0


def meets(outcome: RequestOutcome, slo_ttft_s: float | None, slo_itl_s: float | None) -> bool:
    """Returns whether a request was answered in full and in time; an objective that is None asks for nothing."""
    if outcome.status is not Status.DONE or outcome.ttft_s is None:
        return False
    if slo_ttft_s is not None and outcome.ttft_s > slo_ttft_s:
        return False
    return slo_itl_s is None or outcome.itl_mean_s is None or outcome.itl_mean_s <= slo_itl_s


def goodput(run: SimulatedRun, slo_ttft_s: float | None, slo_itl_s: float | None) -> float:
    """Requests per second that met their objectives (as DistServe counts them, OSDI '24), over the run's duration."""
    good = sum(meets(outcome, slo_ttft_s, slo_itl_s) for outcome in run.outcomes)
    return good / run.duration_s if run.duration_s else 0.0


def attainment(run: SimulatedRun, slo_ttft_s: float | None, slo_itl_s: float | None) -> float:
    """Returns share of all requests, refused ones included, that met their objectives."""
    good = sum(meets(outcome, slo_ttft_s, slo_itl_s) for outcome in run.outcomes)
    return good / len(run.outcomes) if run.outcomes else 0.0


def prediction_errors(outcomes: Sequence[RequestOutcome]) -> list[float]:
    """Returns signed and relative, of the time to first token: above 0 where the router expected too much."""
    return [
        outcome.predicted_ttft_s / outcome.since_decision_s - 1
        for outcome in outcomes
        if outcome.predicted_ttft_s is not None and outcome.since_decision_s
    ]
