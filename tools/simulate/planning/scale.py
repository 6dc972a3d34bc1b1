"""`twostroke simulate scale`: the live planner over a simulated fleet, held against fleets that stay as they are."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cluster.scaling.capacity import RequestDemand
from cluster.scaling.planner import FleetObservation, Planner, ScalingDecision
from cluster.supervisor.reconcile.autoscaler import with_loads
from cluster.values.worker_counts import LatencyTargets, WorkerCounts
from tools.output import JsonFile, write_json
from tools.simulate.fleet import results
from tools.simulate.fleet.results import RequestOutcome, SimulatedRun, Status
from tools.simulate.fleet.routing.simulated_routing import RoutingSetup
from tools.simulate.fleet.scaling import FleetReport
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.simulation import simulate
from tools.simulate.options import FleetQuestion, Promise
from tools.simulate.planning.demand import check_objectives
from tools.simulate.reports.report import percent
from tools.simulate.traces.trace import Trace
from tools.simulate.variants import OURS, policy_of
from tools.tables import Grid, console_for, table_of, text_grid, text_row
from twostroke.base.errors import ConfigError
from twostroke.config import Role, ScalingConfig, flags
from twostroke.config.settings import group, setting

SWITCH_S = 1.0
"""Seconds that a change of role takes on live workers (docs/scaling.md)."""


@dataclass(slots=True)
class Planned:
    """The planner as the simulator asks it."""

    planner: Planner
    first: WorkerCounts
    tick_s: float
    start_s: float
    block_size: int
    switch_s: float = SWITCH_S
    history: list[tuple[float, ScalingDecision]] = field(default_factory=list)
    """Each change, and why."""

    @property
    def begin(self) -> dict[Role, int]:
        return _by_role(self.first)

    def __call__(self, report: FleetReport) -> dict[Role, int]:
        desired = WorkerCounts(report.desired[Role.PREFILL], report.desired[Role.DECODE])
        seen = FleetObservation(
            at_s=report.at_s,
            arrived=report.arrived,
            ended=tuple(_demands(report.ended)),
            serving=WorkerCounts(report.serving[Role.PREFILL], report.serving[Role.DECODE]),
            desired=desired,
        )
        decision = self.planner.decide(with_loads(seen, report.loads, self.block_size))
        if decision.wanted != desired:
            self.history.append((report.at_s, decision))
        return _by_role(decision.wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """One fleet."""

    name: str
    attainment: float
    """Share of all requests with a first token and an answer within the promised times."""
    ttft_p90_s: float | None
    worker_s: float
    changes: int
    not_answered: int


class ScalePromise(Promise):
    """What is promised, and what may be used for it."""

    min_prefill: int | None = setting(None, default_text="as --prefill", help="fewest prefill workers")
    max_prefill: int = setting(..., help="most prefill workers")
    min_decode: int | None = setting(None, default_text="as --decode", help="fewest decode workers")
    max_decode: int = setting(..., help="most decode workers")
    start_s: float = setting(20.0, least=0, help="time until a new worker serves")
    surge: float = setting(1.0, unit="FACTOR", help="the middle third of the requests comes FACTOR times as fast")


class ScaleFlags(FleetQuestion):
    promise: ScalePromise = group(ScalePromise, "promise", "what is promised, and what may be used")
    output: JsonFile = group(JsonFile, "output")


def run_session(args: argparse.Namespace) -> int:
    flags_given = flags.read(ScaleFlags, args)
    wanted = flags_given.promise
    promise = LatencyTargets(ttft_s=wanted.slo_ttft_s, itl_s=wanted.slo_itl_s)
    trace, shape = flags_given.read()
    trace = surged(trace, wanted.surge)
    bounds = ("min_prefill", "max_prefill", "min_decode", "max_decode")
    pace = ScalingConfig(**wanted.model_dump(include=set(bounds)))
    check_objectives(trace, shape, promise)
    planned, outcomes = compared(trace, shape, promise, pace, wanted.start_s)
    console = console_for(flags_given.output.json_path)
    console.print(
        f"{flags_given.source.label}: {len(trace.rows)} requests, the middle third x{wanted.surge:g}", markup=False
    )
    console.print(table_of(_grid(outcomes)))
    for at_s, decision in planned.history:
        console.print(f"{at_s:8.1f} s  {decision}", markup=False, soft_wrap=True)
    history = [{"at_s": at_s, **dataclasses.asdict(decision)} for at_s, decision in planned.history]
    content = {"schema_version": 1, "fleets": list(map(dataclasses.asdict, outcomes)), "changes": history}
    write_json(content, flags_given.output.json_path)
    return 0


def compared(
    trace: Trace, shape: FleetShape, promise: LatencyTargets, pace: ScalingConfig, start_s: float
) -> tuple[Planned, list[FleetOutcome]]:
    """Returns the scaled fleet, one that stays as it begins, and one with all that there may be."""
    first = WorkerCounts(shape.prefill, shape.decode)
    prefill, decode = pace.prefill_bounds(first.prefill), pace.decode_bounds(first.decode)
    planner = Planner(promise, prefill, decode, pace, may_switch=pace.may_switch(*first.pair))
    planned = Planned(planner, first, pace.tick_s, start_s, shape.block_size)
    most = dataclasses.replace(shape, prefill=prefill.most, decode=decode.most)
    runs = (
        (f"planned, {prefill.least}..{prefill.most} + {decode.least}..{decode.most}", most, planned),
        (f"{first} (as it begins)", shape, None),
        (f"{prefill.most} prefill + {decode.most} decode (all)", most, None),
    )
    outcomes = []
    for name, fleet, scaler in runs:
        run = simulate(trace, fleet, RoutingSetup(OURS, lambda: policy_of(OURS), holds=True), scaler)
        outcomes.append(_outcome_of(name, run, promise))
    return planned, outcomes


def surged(trace: Trace, factor: float) -> Trace:
    """Returns a trace with requests of the middle third `factor` times as fast. Raises ConfigError."""
    if not 0 < factor < float("inf"):
        raise ConfigError(f"--surge must be positive, got {factor:g}", field="surge")
    third = len(trace.rows) // 3
    rows, at_s, before_s = [], 0.0, 0.0
    for index, row in enumerate(trace.rows):
        gap_s, before_s = row.timestamp_s - before_s, row.timestamp_s
        at_s += gap_s / factor if third <= index < 2 * third else gap_s
        rows.append(dataclasses.replace(row, timestamp_s=at_s))
    return dataclasses.replace(trace, rows=tuple(rows))


def _demands(ended: Iterable[RequestOutcome]) -> Iterable[RequestDemand]:
    for outcome in ended:
        if outcome.status is Status.DONE:
            yield RequestDemand(
                outcome.prompt_tokens - outcome.cached_tokens, outcome.cached_tokens, outcome.output_tokens
            )


def _outcome_of(name: str, run: SimulatedRun, promise: LatencyTargets) -> FleetOutcome:
    return FleetOutcome(
        name=name,
        attainment=results.attainment(run, promise.ttft_s, promise.itl_s),
        ttft_p90_s=results.percentile(results.ttfts(run), 0.9),
        worker_s=run.worker_s,
        changes=run.scalings,
        not_answered=len(run.outcomes) - len(run.of_status(Status.DONE)),
    )


def _grid(outcomes: Sequence[FleetOutcome]) -> Grid:
    rows = (
        text_row(
            each.name,
            percent(each.attainment),
            "-" if each.ttft_p90_s is None else f"{each.ttft_p90_s:.2f} s",
            f"{each.worker_s:,.0f}",
            str(each.changes),
            str(each.not_answered),
        )
        for each in outcomes
    )
    return text_grid(("fleet", "in time", "TTFT p90", "worker-seconds", "changes", "not answered"), rows)


def _by_role(counts: WorkerCounts) -> dict[Role, int]:
    return {Role.PREFILL: counts.prefill, Role.DECODE: counts.decode}
