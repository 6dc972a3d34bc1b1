"""`twostroke simulate plan`: how many workers of each role a load needs, and from where on splitting them pays."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from cluster.values.worker_counts import LatencyTargets, WorkerCounts
from tools.figures.charts import Figure, Head, Line, Section, Words, line_figure, render
from tools.output import write_json, write_text
from tools.simulate.options import FleetQuestion, Output, Promise, numbers
from tools.simulate.planning.demand import check_objectives
from tools.simulate.planning.sizing import LoadPoint, Sizing, crossing, crossover, smallest_fleet
from tools.simulate.reports.report import percent, seconds
from tools.simulate.runs import runner
from tools.tables import Grid, console_for, table_of, text_grid, text_row
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import group, setting

BOTH, SPLIT = "colocated", "split"


class PlanPromise(Promise):
    """What is promised, and at which loads splits are compared."""

    attainment: float = setting(0.9, unit="SHARE", help="share of requests that get both")
    loads: str = setting(
        "0.25,0.5,0.75,1,1.25,1.5,2",
        unit="X[,X]",
        help="times the trace's pace, at which splits are compared with as many workers that do both",
    )


class PlanFlags(FleetQuestion):
    promise: PlanPromise = group(PlanPromise, "promise", "what is promised")
    output: Output = group(Output, "output")


def run_session(args: argparse.Namespace) -> int:
    flags_given = flags.read(PlanFlags, args)
    output, scales = flags_given.output, numbers("--loads", flags_given.promise.loads)
    promise = LatencyTargets(
        ttft_s=flags_given.promise.slo_ttft_s,
        itl_s=flags_given.promise.slo_itl_s,
        attainment=flags_given.promise.attainment,
    )
    if any(scale <= 0 for scale in scales):
        raise ConfigError(f"--loads must be positive, got {flags_given.promise.loads}", field="loads")
    trace, shape = flags_given.read()
    check_objectives(trace, shape, promise)
    with runner(output.processes) as run_all:
        sizing = smallest_fleet(trace, shape, promise, run_all)
        enough = dataclasses.replace(shape, prefill=sizing.smallest.prefill, decode=sizing.smallest.decode)
        points = crossover(trace, enough, promise, scales, run_all)
    heading = f"{flags_given.source.label}: {len(trace.rows)} requests; {_words(promise)}"
    console = console_for(output.json_path)
    console.print(heading, markup=False)
    for title, found in ((answer(sizing), _tried_grid(sizing)), (pays(points), _points_grid(points))):
        console.print(title, style="bold", markup=False)
        console.print(table_of(found))
    write_json({"schema_version": 1, "setting": heading, **_as_json(sizing, points)}, output.json_path)
    if output.html_path is not None:
        write_text(_page(sizing, points, heading), output.html_path)
    return 0


def answer(sizing: Sizing) -> str:
    smallest, formula = sizing.smallest, sizing.formula
    return f"needs {smallest} workers (the formula alone says {formula}; {len(sizing.tried)} fleets simulated)"


def pays(points: Sequence[LoadPoint]) -> str:
    """Says in a line at which load splitting begins to pay."""
    found = crossing(points)
    if found is not None:
        rate, above = found
        return f"splitting pays {'above' if above else 'below'} {rate:.2f} requests/s"
    lead = sum(point.best[1] - point.colocated for point in points)
    if lead == 0:
        return "splitting makes no difference at any of these loads"
    return f"splitting {'pays' if lead > 0 else 'does not pay'} at any of these loads"


def _words(promise: LatencyTargets) -> str:
    return (
        f"{promise.attainment:.0%} of requests with a first token within {promise.ttft_s:g} s and {promise.itl_s:g} s "
        "between tokens on average"
    )


def _tried_grid(sizing: Sizing) -> Grid:
    rows = [
        text_row(
            f"{each.counts}{' *' if each.counts == sizing.smallest else ''}",
            percent(each.attainment),
            percent(each.ttft_attainment),
            percent(each.itl_attainment),
            seconds(each.ttft_p90_s),
            seconds(each.itl_p99_s),
            f"{each.utilisation:.3f}",
        )
        for each in sizing.tried
    ]
    return text_grid(("workers", "in time", "first tokens", "answers", "TTFT p90", "ITL p99", "util"), rows)


def _points_grid(points: Sequence[LoadPoint]) -> Grid:
    splits = list(points[0].goodput) if points else []
    rows = [
        text_row(
            f"{point.requests_per_s:.2f} (x{point.rate_scale:g})",
            *(f"{point.goodput[split]:.2f}" for split in splits),
            str(point.best[0]),
        )
        for point in points
    ]
    return text_grid(("requests/s", *(_split_name(split) for split in splits), "best split"), rows)


def _split_name(counts: WorkerCounts) -> str:
    return f"{counts.prefill}+{counts.decode}" if counts.prefill else f"{counts.decode} {BOTH}"


def _as_json(sizing: Sizing, points: Sequence[LoadPoint]) -> dict[str, Any]:
    found = crossing(points)
    return {
        **dataclasses.asdict(sizing),
        "crossover": [
            {
                "requests_per_s": point.requests_per_s,
                "rate_scale": point.rate_scale,
                "goodput": {_split_name(counts): good for counts, good in point.goodput.items()},
            }
            for point in points
        ],
        "crossing": None if found is None else {"requests_per_s": found[0], "splitting_pays_above": found[1]},
        "verdict": pays(points),
    }


def _page(sizing: Sizing, points: Sequence[LoadPoint], setting: str) -> str:
    lines = [
        Line(0, tuple((point.requests_per_s, point.colocated) for point in points), name=BOTH),
        Line(1, tuple((point.requests_per_s, point.best[1]) for point in points), name=SPLIT),
    ]
    words = Words("goodput of split and colocated workers over load", "requests/s", "goodput, requests/s")
    figure = Figure("Goodput over load: best split, and as many workers that do both", line_figure(lines, words))
    return render(
        Head("twostroke simulate plan", setting, (BOTH, SPLIT)),
        [
            Section("How many workers", answer(sizing), _tried_grid(sizing)),
            Section("Where splitting pays", pays(points), _points_grid(points), (figure,)),
        ],
    )
