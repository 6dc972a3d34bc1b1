"""`twostroke simulate plan`: how many workers of each role a load needs, and from where on splitting them pays."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.scaling.capacity import LatencyTargets, WorkerCounts
from tools.figures.charts import Figure, Grid, Head, Line, Row, Section, Words, line_figure, render
from tools.output import write_json, write_text
from tools.simulate.demand import check_objectives
from tools.simulate.options import (
    Output,
    add_fleet,
    add_output,
    add_source,
    fleet_from,
    numbers,
    output_from,
    source_from,
)
from tools.simulate.report import console_for, percent, seconds
from tools.simulate.runs import runner
from tools.simulate.sizing import LoadPoint, Sizing, crossing, crossover, smallest_fleet
from twostroke.errors import ConfigError

BOTH, SPLIT = "colocated", "split"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is promised")
    group.add_argument("--slo-ttft", type=float, required=True, metavar="S", help="the first token within S seconds")
    group.add_argument("--slo-itl", type=float, required=True, metavar="S", help="on average S seconds between tokens")
    group.add_argument(
        "--attainment", type=float, default=0.9, metavar="SHARE", help="of requests (default: %(default)s)"
    )
    group.add_argument(
        "--loads",
        default="0.25,0.5,0.75,1,1.25,1.5,2",
        metavar="X[,X]",
        help="times the trace's pace, at which splits are compared with as many workers that do both (%(default)s)",
    )
    add_source(parser)
    add_fleet(parser)
    add_output(parser)


def run_session(args: argparse.Namespace) -> int:
    promise = LatencyTargets(ttft_s=args.slo_ttft, itl_s=args.slo_itl, attainment=args.attainment)
    source, output, scales = source_from(args), output_from(args), numbers("--loads", args.loads)
    if any(scale <= 0 for scale in scales):
        raise ConfigError(f"--loads must be positive, got {args.loads}", field="loads")
    trace = source.read()
    shape = fleet_from(args, trace.block_tokens)
    check_objectives(trace, shape, promise)
    run_all = runner(output.jobs)
    sizing = smallest_fleet(trace, shape, promise, run_all)
    enough = dataclasses.replace(shape, prefill=sizing.smallest.prefill, decode=sizing.smallest.decode)
    points = crossover(trace, enough, promise, scales, run_all)
    _show(sizing, points, f"{source.label}: {len(trace.rows)} requests; {_words(promise)}", output)
    return 0


def _show(sizing: Sizing, points: Sequence[LoadPoint], setting: str, output: Output) -> None:
    console = console_for(output.json_path)
    console.print(setting, markup=False)
    _print(sizing, points, console)
    write_json({"schema_version": 1, "setting": setting, **_as_json(sizing, points)}, output.json_path)
    if output.html_path is not None:
        write_text(_page(sizing, points, setting), output.html_path)


def _print(sizing: Sizing, points: Sequence[LoadPoint], console: Console) -> None:
    for title, grid in ((answer(sizing), _tried_grid(sizing)), (pays(points), _points_grid(points))):
        console.print(f"[bold]{escape(title)}[/bold]")
        table = Table(box=None, pad_edge=False)
        for at, heading in enumerate(grid.headings):
            table.add_column(heading, justify="right" if at else "left", no_wrap=True)
        for row in grid.rows:
            table.add_row(*row.cells)
        console.print(table)


def answer(sizing: Sizing) -> str:
    smallest, formula = sizing.smallest, sizing.formula
    return f"needs {smallest} workers (the formula alone says {formula}; {len(sizing.tried)} fleets simulated)"


def pays(points: Sequence[LoadPoint]) -> str:
    """Say in a line at which load splitting begins to pay."""
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
        Row(
            None,
            (
                f"{each.counts}{' *' if each.counts == sizing.smallest else ''}",
                percent(each.attainment),
                percent(each.ttft_attainment),
                percent(each.itl_attainment),
                seconds(each.ttft_p90_s),
                seconds(each.itl_p99_s),
                f"{each.utilisation:.3f}",
            ),
        )
        for each in sizing.tried
    ]
    return Grid(("workers", "in time", "first tokens", "answers", "TTFT p90", "ITL p99", "util"), tuple(rows))


def _points_grid(points: Sequence[LoadPoint]) -> Grid:
    splits = list(points[0].goodput) if points else []
    rows = [
        Row(
            None,
            (
                f"{point.requests_per_s:.2f} (x{point.rate_scale:g})",
                *(f"{point.goodput[split]:.2f}" for split in splits),
                str(point.best[0]),
            ),
        )
        for point in points
    ]
    return Grid(("requests/s", *(_split_name(split) for split in splits), "best split"), tuple(rows))


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
