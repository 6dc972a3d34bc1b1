"""Tells the planner what a trace demands and what a simulated fleet can do. Pure."""

from __future__ import annotations

from cluster.flags.checks import field_of
from cluster.scaling.capacity import ExpectedLoad, MeasuredCapacity, RequestDemand, check_possible, first_tokens_alone_s
from cluster.values.worker_counts import LatencyTargets
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.worker.branches import costs_of
from tools.simulate.runs import span_s
from tools.simulate.traces.oracle import LeastRecent, found_in_turns
from tools.simulate.traces.trace import Trace
from twostroke.base.errors import ConfigError

BURST_S = 10.0
"""Length of the intervals in which arrivals are counted. Their variance over their mean says how bursty a trace is."""


def load_of(trace: Trace, capacity_blocks: int, rate_scale: float = 1.0) -> ExpectedLoad:
    """Returns what the trace asks of a fleet, at `rate_scale` times its own pace.

    Tokens count as cached where one cache of `capacity_blocks`, which sees every request, would hold them: good
    placement comes near to that. Raises ConfigError for requests that all come at once.
    """
    if not span_s(trace):
        raise ConfigError("a load needs requests at more than one instant (try --jitter)", field="trace")
    found = found_in_turns(trace, [LeastRecent(capacity_blocks)])
    demands = tuple(
        RequestDemand(row.input_tokens - cached, cached, row.output_tokens)
        for row, cached in zip(trace.rows, found, strict=True)
    )
    return ExpectedLoad(
        requests_per_s=rate_scale * len(trace.rows) / span_s(trace),
        demands=demands,
        arrival_variation=_dispersion(trace, rate_scale),
    )


def capacity_of(shape: FleetShape) -> MeasuredCapacity:
    """Returns what each worker of a simulated fleet can do, as the planner measures it on live ones."""
    delays = shape.delays
    calls_s = delays.frontend_s + 2 * delays.open_s + 2 * delays.pull_s + delays.token_s
    return MeasuredCapacity(
        cost=costs_of(shape),
        step_tokens=shape.step_tokens,
        decode_pool_tokens=shape.decode_pool_tokens,
        first_token_overhead_s=calls_s + shape.cost.of_streams(1, 0),
        token_transfer_s=shape.page_bytes / shape.block_size / shape.link_bytes_per_s,
    )


def check_objectives(trace: Trace, shape: FleetShape, promise: LatencyTargets, flag: str = "--slo-ttft") -> None:
    """Checks that some request could meet the objectives if it had the fleet for itself and every earlier token were
    cached. Raises ConfigError that names `flag` where none could."""
    if promise.ttft_s is None and promise.itl_s is None:
        return
    load, capacity = load_of(trace, sum(len(row.blocks) for row in trace.rows)), capacity_of(shape)
    quickest_s = min(first_tokens_alone_s(load, capacity))
    if promise.ttft_s is not None and promise.ttft_s < quickest_s:
        raise ConfigError(
            f"{flag} {promise.ttft_s:g} is impossible: on an empty fleet the quickest of these requests takes "
            f"{quickest_s:.3g} s to its first token",
            field=field_of(flag),
        )
    check_possible(load, capacity, LatencyTargets(ttft_s=None, itl_s=promise.itl_s))


def _dispersion(trace: Trace, rate_scale: float) -> float:
    """Returns the index of dispersion of counts in intervals; 1 where requests come as in a Poisson process."""
    interval_s = BURST_S * rate_scale
    intervals = max(1, int(span_s(trace) / interval_s))
    counts = [0] * (intervals + 1)
    begin_s = trace.rows[0].timestamp_s
    for row in trace.rows:
        counts[int((row.timestamp_s - begin_s) / interval_s)] += 1
    whole = counts[:intervals]
    mean = sum(whole) / len(whole)
    return sum((count - mean) ** 2 for count in whole) / len(whole) / mean if mean and intervals > 1 else 1.0
