"""At which pace a trace makes a fleet as busy, or as slow, as asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tools.rate_search import SearchLimits, Tried, bracket_of, next_rate
from tools.simulate.fleet import results
from tools.simulate.fleet.results import SimulatedRun
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.runs import Runner, Trial, span_s
from tools.simulate.traces.oracle import LeastRecent, found_in_turns
from tools.simulate.traces.trace import Trace
from twostroke.base.errors import ConfigError

MOST_CORRECTIONS = 4
NEAR = 0.01
"""Relative difference from the wanted utilisation that will do."""
SATURATED = 0.97
"""Utilisation above which workers do not measure what is offered: their queues only grow."""
REACH = 32.0
"""Factor by which the paces that are searched may be slower or faster than the trace's own."""


def offered_in_turns(trace: Trace, shape: FleetShape) -> float:
    """Returns how busy round-robin would keep prefill workers at the trace's own pace; above 1 they cannot keep up."""
    if not shape.prefill:
        raise ConfigError("--utilisation is that of prefill workers: --prefill must be 1 or more", field="utilisation")
    caches = [LeastRecent(shape.prefill_pages) for _ in range(shape.prefill)]
    work_s = 0.0
    for row, found in zip(trace.rows, found_in_turns(trace, caches), strict=True):
        whole = row.input_tokens // trace.block_tokens * trace.block_tokens
        work_s += shape.cost.of_prompt(whole - found, found, shape.step_tokens)
    if not span_s(trace) or not work_s:
        raise ConfigError("--utilisation needs requests that take time: these have no span or no block", field="trace")
    return work_s / (shape.prefill * span_s(trace))


def pace_at(utilisation: float, trial: Trial, run_all: Runner) -> float:
    """Returns the rate scale at which the trial's policy keeps prefill workers that busy: by formula for policies that
    take turns, then corrected by runs.
    """
    scale = utilisation / offered_in_turns(trial.trace, trial.shape)
    if utilisation >= SATURATED:
        return scale
    for _ in range(MOST_CORRECTIONS):
        (run,) = run_all([replace(trial, rate_scale=scale)])
        found = results.utilisation(run)
        if not found:
            raise ConfigError(f"--of {trial.variant}: it keeps prefill workers idle at any pace", field="of")
        if abs(found / utilisation - 1) <= NEAR:
            break
        scale *= utilisation / found
    return scale


@dataclass(frozen=True, slots=True)
class FoundRate:
    """Between which paces the promise breaks."""

    variant: str
    keeps: float | None
    """The highest pace at which it was kept, in requests per second; None: at none."""
    breaks: float | None
    """None: at none that was tried."""
    p90_s: float | None
    """At the pace that keeps it."""
    utilisation: float | None


def highest_rates(trials: Sequence[Trial], ttft_s: float, precision: float, run_all: Runner) -> list[FoundRate]:
    """Returns for each trial the highest rate with a p90 TTFT up to `ttft_s`. All searches run in parallel."""
    own = _requests_per_s(trials[0].trace)
    limits = SearchLimits(start=own, lowest=own / REACH, highest=own * REACH, precision=precision)
    tried: list[list[Tried]] = [[] for _ in trials]
    runs: list[dict[float, SimulatedRun]] = [{} for _ in trials]
    while True:
        wanted = [(at, rate) for at, past in enumerate(tried) if (rate := next_rate(past, limits)) is not None]
        if not wanted:
            break
        found = run_all([replace(trials[at], rate_scale=rate / own) for at, rate in wanted])
        for (at, rate), run in zip(wanted, found, strict=True):
            tried[at].append(Tried(rate, keeps(run, ttft_s)))
            runs[at][rate] = run
    return [_found(trial.variant, past, seen) for trial, past, seen in zip(trials, tried, runs, strict=True)]


def keeps(run: SimulatedRun, ttft_s: float) -> bool:
    """Returns whether nine in ten of all requests, refused ones included, have their first token in time."""
    in_time = sum(ttft <= ttft_s for ttft in results.ttfts(run))
    return in_time >= 0.9 * len(run.outcomes)


def _requests_per_s(trace: Trace) -> float:
    if not span_s(trace):
        raise ConfigError("--find-rate needs requests at more than one instant (try --jitter)", field="find_rate")
    return len(trace.rows) / span_s(trace)


def _found(variant: str, tried: Sequence[Tried], runs: dict[float, SimulatedRun]) -> FoundRate:
    bracket = bracket_of(tried)
    run = runs[bracket.passing] if bracket.passing is not None else None
    return FoundRate(
        variant,
        bracket.passing,
        bracket.failing,
        results.percentile(results.ttfts(run), 0.9) if run is not None else None,
        results.utilisation(run) if run is not None else None,
    )
