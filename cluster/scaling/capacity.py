"""Computes how many workers of each role a load needs to keep its latency targets. Pure.

Prefill workers are a queue with several servers. The wait follows Allen and Cunneen's approximation of M/G/n: a request
waits with Erlang's probability C, then for an exponential time (W. Whitt, "Approximations for the GI/G/m queue", 1993).
Streams on decode workers are in equilibrium: as many run as arrive while one is generated, and each step takes longer
with more streams.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.values.worker_counts import LatencyTargets, WorkerCounts
from twostroke.base.errors import ConfigError
from twostroke.scheduler.cost import StepCost

MOST_WORKERS = 4096
"""Most workers of one role. A load that needs more is a mistake in its units."""
POISSON_SLACK = 1.28
"""Standard deviations: streams are at most this far above their mean nine times in ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCapacity:
    """Costs and sizes of one worker of each role."""

    cost: StepCost
    step_tokens: int
    decode_pool_tokens: int
    first_token_overhead_s: float = 0.0
    """Seconds to the first token besides waiting, computing and moving pages: calls, and the step that samples."""
    token_transfer_s: float = 0.0
    """Seconds to move one token of the last chunk. Earlier chunks move while the next one is computed."""


@dataclass(frozen=True, slots=True)
class RequestDemand:
    """One request as the workers see it."""

    computed_tokens: int
    """Prompt tokens that no worker has cached."""
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLoad:
    requests_per_s: float
    demands: tuple[RequestDemand, ...]
    """A sample of requests; never empty."""
    arrival_variation: float = 1.0
    """Squared coefficient of variation of the times between arrivals; 1 is Poisson."""


def counts_for(load: ExpectedLoad, capacity: MeasuredCapacity, promise: LatencyTargets) -> WorkerCounts:
    """Returns the fewest workers that meet the targets by formula. Raises ConfigError where no number would."""
    check_possible(load, capacity, promise)
    return WorkerCounts(_prefill_count(load, capacity, promise), _decode_count(load, capacity, promise))


def check_possible(load: ExpectedLoad, capacity: MeasuredCapacity, promise: LatencyTargets) -> None:
    """Raises ConfigError where not even an empty fleet meets the targets; the message says what it takes."""
    if promise.ttft_s is not None:
        alone_s = _quantile(sorted(first_tokens_alone_s(load, capacity)), promise.attainment)
        if alone_s > promise.ttft_s:
            raise ConfigError(
                f"--slo-ttft {promise.ttft_s:g}: no fleet is large enough, since {1 - promise.attainment:.0%} of these "
                f"requests take more than {alone_s:.3g} s to their first token on an empty one",
                field="slo_ttft",
            )
    shortest_s = capacity.cost.of_streams(1, 0)
    if promise.itl_s is not None and shortest_s > promise.itl_s:
        raise ConfigError(
            f"--slo-itl {promise.itl_s:g}: no fleet is large enough, since a step with one stream takes "
            f"{shortest_s:.3g} s",
            field="slo_itl",
        )


def first_tokens_alone_s(load: ExpectedLoad, capacity: MeasuredCapacity) -> list[float]:
    """Returns each request's time to first token if it had the fleet for itself."""
    return [
        own_s + overhead_s(demand, capacity)
        for demand, own_s in zip(load.demands, prefill_seconds(load, capacity), strict=True)
    ]


def overhead_s(demand: RequestDemand, capacity: MeasuredCapacity) -> float:
    last_chunk = min(capacity.step_tokens, demand.computed_tokens)
    return capacity.first_token_overhead_s + last_chunk * capacity.token_transfer_s


def prefill_seconds(load: ExpectedLoad, capacity: MeasuredCapacity) -> list[float]:
    return [
        capacity.cost.of_prompt(demand.computed_tokens, demand.cached_tokens, capacity.step_tokens)
        for demand in load.demands
    ]


def prefill_workers_busy(load: ExpectedLoad, capacity: MeasuredCapacity) -> float:
    """Returns how many prefill workers the load keeps busy without a pause; fewer never suffice."""
    seconds = prefill_seconds(load, capacity)
    return load.requests_per_s * sum(seconds) / len(seconds)


def attainment_of(prefill: int, load: ExpectedLoad, capacity: MeasuredCapacity, ttft_s: float) -> float:
    """Returns the predicted share of requests whose first token comes within `ttft_s`."""
    own_s = prefill_seconds(load, capacity)
    mean_s = sum(own_s) / len(own_s)
    busy = load.requests_per_s * mean_s
    if busy >= prefill:
        return 0.0
    variation = sum((each - mean_s) ** 2 for each in own_s) / len(own_s) / mean_s**2 if mean_s else 0.0
    waits = _erlang_c(prefill, busy)
    wait_s = mean_s * (load.arrival_variation + variation) / 2 / (prefill - busy)
    kept = 0.0
    for alone_s in first_tokens_alone_s(load, capacity):
        slack_s = ttft_s - alone_s
        if slack_s >= 0:
            kept += 1 - waits * math.exp(-slack_s / wait_s) if wait_s else 1.0
    return kept / len(own_s)


def _prefill_count(load: ExpectedLoad, capacity: MeasuredCapacity, promise: LatencyTargets) -> int:
    least = math.floor(prefill_workers_busy(load, capacity)) + 1
    if promise.ttft_s is None:
        return least
    ttft_s = promise.ttft_s
    count = _fewest(max(1, least), lambda count: attainment_of(count, load, capacity, ttft_s) >= promise.attainment)
    if count is None:
        raise ConfigError(f"this load needs more than {MOST_WORKERS} prefill workers: check its rate", field="slo_ttft")
    return count


def _decode_count(load: ExpectedLoad, capacity: MeasuredCapacity, promise: LatencyTargets) -> int:
    context = mean_context_tokens(load)

    def is_enough(count: int) -> bool:
        streams = streams_per_worker(count, load, capacity)
        if streams is None:
            return False
        busy = streams + POISSON_SLACK * math.sqrt(streams)
        fits = busy * context <= capacity.decode_pool_tokens
        return fits and (promise.itl_s is None or _step_s(capacity, busy, context) <= promise.itl_s)

    count = _fewest(1, is_enough)
    if count is None:
        raise ConfigError(f"this load needs more than {MOST_WORKERS} decode workers: check its rate", field="slo_itl")
    return count


def _fewest(least: int, is_enough: Callable[[int], bool]) -> int | None:
    """Returns the first count from `least` on that is enough, as all larger ones are; None beyond MOST_WORKERS."""
    counts = range(least, MOST_WORKERS + 1)
    at = bisect.bisect_left(counts, True, key=is_enough)
    return counts[at] if at < len(counts) else None


def streams_per_worker(count: int, load: ExpectedLoad, capacity: MeasuredCapacity) -> float | None:
    """Returns the streams per worker in equilibrium; None where there is none.

    Streams are the arrivals during one stream, which takes its tokens times a step with that many streams.
    """
    output = sum(demand.output_tokens for demand in load.demands) / len(load.demands)
    tokens_per_s = load.requests_per_s * output / count
    cost = capacity.cost
    per_stream_s = cost.stream_s + mean_context_tokens(load) * cost.context_token_s
    left = 1 - tokens_per_s * per_stream_s
    return tokens_per_s * cost.step_s / left if left > 0 else None


def mean_context_tokens(load: ExpectedLoad) -> float:
    """Returns the mean context of a stream half way through its output, where longer outputs weigh more."""
    weight = sum(demand.output_tokens for demand in load.demands)
    total = sum(
        demand.output_tokens * (demand.computed_tokens + demand.cached_tokens + demand.output_tokens / 2)
        for demand in load.demands
    )
    return total / weight if weight else 0.0


def _step_s(capacity: MeasuredCapacity, streams: float, context_tokens: float) -> float:
    cost = capacity.cost
    return cost.step_s + streams * (cost.stream_s + context_tokens * cost.context_token_s)


def _erlang_c(servers: int, busy: float) -> float:
    """Returns the share of arrivals that find all servers busy (Erlang's C, by the recursion of his B)."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = busy * blocked / (number + busy * blocked)
    return blocked / (1 - busy / servers * (1 - blocked))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]
