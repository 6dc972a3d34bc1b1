"""The smallest fleet that keeps a promise, by simulation around the planner's formula; and who wins at which load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.scaling.capacity import counts_for, prefill_workers_busy
from cluster.values.worker_counts import LatencyTargets, WorkerCounts
from tools.simulate.fleet import results
from tools.simulate.fleet.results import SimulatedRun, Status
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.planning.demand import capacity_of, load_of
from tools.simulate.runs import Runner, Trial
from tools.simulate.traces.trace import Trace
from tools.simulate.variants import OURS
from twostroke.base.errors import ConfigError

MOST_WORKERS = 256
"""Workers of a fleet that is simulated: each run of a larger one takes minutes."""
LEAST_BUSY = 0.01
"""Share of its time that one prefill worker must compute: a fleet that only idles teaches nothing."""
MOST_GROWTHS = 12
"""Steps up from what the formula says, before giving up."""
NEIGHBOURS = 3
"""Splits tried of each smaller total: those next to the last one that was enough."""


Keeps = Callable[[Sequence[WorkerCounts]], WorkerCounts | None]
"""The first of them that keeps the promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedFleet:
    """One fleet that was simulated."""

    counts: WorkerCounts
    attainment: float
    """Share of all requests that got what was promised."""
    ttft_attainment: float
    itl_attainment: float
    ttft_p90_s: float | None
    itl_p99_s: float | None
    utilisation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    formula: WorkerCounts
    """The counts at which the search began."""
    smallest: WorkerCounts
    tried: tuple[TriedFleet, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One load of the comparison of splits with workers that do both."""

    rate_scale: float
    requests_per_s: float
    goodput: dict[WorkerCounts, float]
    """Goodput by split; without prefill workers, all workers do both phases."""

    @property
    def colocated(self) -> float:
        return next(good for counts, good in self.goodput.items() if not counts.prefill)

    @property
    def best(self) -> tuple[WorkerCounts, float]:
        split = {counts: good for counts, good in self.goodput.items() if counts.prefill}
        counts = max(split, key=lambda each: split[each])
        return counts, split[counts]


def smallest_fleet(trace: Trace, shape: FleetShape, promise: LatencyTargets, run_all: Runner) -> Sizing:
    """Raises ConfigError where no fleet would do."""
    load, capacity = load_of(trace, shape.prefill_pages * max(1, shape.prefill)), capacity_of(shape)
    formula = counts_for(load, capacity, promise)
    _check_can_be_simulated(formula, prefill_workers_busy(load, capacity))
    tried: dict[WorkerCounts, TriedFleet] = {}

    def keeps(candidates: Sequence[WorkerCounts]) -> WorkerCounts | None:
        new = [counts for counts in candidates if counts not in tried]
        for counts, run in zip(new, run_all([_trial(trace, shape, counts) for counts in new]), strict=True):
            tried[counts] = _tried(counts, run, promise)
        return next((counts for counts in candidates if tried[counts].attainment >= promise.attainment), None)

    enough = _shrunk(_grown(formula, tried, promise, keeps), keeps)
    return Sizing(formula=formula, smallest=enough, tried=tuple(tried.values()))


def crossover(
    trace: Trace, shape: FleetShape, promise: LatencyTargets, scales: Iterable[float], run_all: Runner
) -> list[LoadPoint]:
    """Returns at each pace the goodput of splits of `shape`'s workers, and of as many workers that do both phases."""
    whole = shape.prefill + shape.decode
    splits = [WorkerCounts(0, whole), *splits_of(whole, WorkerCounts(shape.prefill, shape.decode))]
    paces = list(scales)
    trials = [dataclasses.replace(_trial(trace, shape, split), rate_scale=scale) for scale in paces for split in splits]
    runs = iter(run_all(trials))
    points = []
    for scale in paces:
        here = {split: next(runs) for split in splits}
        any_run = here[splits[0]]
        points.append(
            LoadPoint(
                rate_scale=scale,
                requests_per_s=len(any_run.outcomes) / any_run.span_s if any_run.span_s else 0.0,
                goodput={split: results.goodput(run, promise.ttft_s, promise.itl_s) for split, run in here.items()},
            )
        )
    return points


def crossing(points: Sequence[LoadPoint]) -> tuple[float, bool] | None:
    """Returns the highest load, in requests per second, at which the better of split and colocated changes, and whether
    splitting is better above it. None where one of them is at least as good at every load."""
    leads = [(point.requests_per_s, point.best[1] - point.colocated) for point in points]
    decided = [(rate, lead) for rate, lead in leads if lead]
    changes = [
        (rate + (next_rate - rate) * abs(lead) / (abs(lead) + abs(next_lead)), next_lead > 0)
        for (rate, lead), (next_rate, next_lead) in pairwise(decided)
        if (lead > 0) != (next_lead > 0)
    ]
    return changes[-1] if changes else None


def splits_near(counts: WorkerCounts, total: int) -> list[WorkerCounts]:
    """Returns splits of a smaller total: first one worker less of either role, then their neighbours."""
    wanted = counts.prefill * total / counts.total
    able = [WorkerCounts(prefill, total - prefill) for prefill in range(1, total)]
    return sorted(able, key=lambda each: abs(each.prefill - wanted))[:NEIGHBOURS]


def splits_of(total: int, around: WorkerCounts) -> list[WorkerCounts]:
    """Returns `around` and splits with more of either role, up to a spread of quarters of the whole."""
    step = max(1, total // 8)
    wanted = {around.prefill + step * number for number in (-2, -1, 0, 1, 2)}
    return [WorkerCounts(prefill, total - prefill) for prefill in sorted(wanted) if 0 < prefill < total]


def _grown(
    counts: WorkerCounts, tried: dict[WorkerCounts, TriedFleet], promise: LatencyTargets, keeps: Keeps
) -> WorkerCounts:
    """Adds workers of the role that misses its promise more often, until there are enough."""
    for _ in range(MOST_GROWTHS):
        if keeps([counts]) is not None:
            return counts
        found = tried[counts]
        step = max(1, counts.total // 10)
        if found.ttft_attainment <= found.itl_attainment:
            counts = WorkerCounts(counts.prefill + step, counts.decode)
        else:
            counts = WorkerCounts(counts.prefill, counts.decode + step)
    raise ConfigError(
        f"{counts} workers still miss the promise: {found.ttft_attainment:.0%} of first tokens and "
        f"{found.itl_attainment:.0%} of answers are in time, {promise.attainment:.0%} must be",
        field="slo_ttft",
    )


def _shrunk(counts: WorkerCounts, keeps: Keeps) -> WorkerCounts:
    """Removes workers while there are enough. Steps double until one is too large, and are halved from then on."""
    step, was_too_large = 1, False
    while step:
        smaller = keeps(splits_near(counts, counts.total - step))
        if smaller is not None:
            counts = smaller
        was_too_large = was_too_large or smaller is None
        step = step // 2 if was_too_large else step * 2
    return counts


def _check_can_be_simulated(formula: WorkerCounts, busy: float) -> None:
    """Raises ConfigError for a load that needs a fleet which would take hours to simulate."""
    if formula.total > MOST_WORKERS:
        raise ConfigError(
            f"this load needs {formula} workers by formula, and fleets of more than {MOST_WORKERS} are not simulated: "
            "check its rate",
            field="rate",
        )
    if busy < LEAST_BUSY:
        raise ConfigError(
            f"this load keeps one prefill worker busy for {busy:.2g} of its time: one worker of each role is enough, "
            "and there is nothing to simulate",
            field="rate",
        )


def _trial(trace: Trace, shape: FleetShape, counts: WorkerCounts) -> Trial:
    """Gives each worker the pages that its role has in `shape`; without prefill workers, all of a worker's memory is
    its own prefix cache."""
    pages = shape.decode_pages if counts.prefill else max(shape.decode_pages, shape.prefill_pages)
    fleet = dataclasses.replace(shape, prefill=counts.prefill, decode=counts.decode, decode_pages=pages)
    return Trial(variant=OURS, trace=trace, shape=fleet)


def _tried(counts: WorkerCounts, run: SimulatedRun, promise: LatencyTargets) -> TriedFleet:
    answered = [outcome for outcome in run.outcomes if outcome.status is Status.DONE]
    steady = sum(results.meets(outcome, None, promise.itl_s) for outcome in answered)
    return TriedFleet(
        counts=counts,
        attainment=results.attainment(run, promise.ttft_s, promise.itl_s),
        ttft_attainment=results.attainment(run, promise.ttft_s, None),
        itl_attainment=steady / len(answered) if answered else 0.0,
        ttft_p90_s=results.percentile(results.ttfts(run), 0.9),
        itl_p99_s=run.gaps.percentile(0.99),
        utilisation=results.utilisation(run),
    )
