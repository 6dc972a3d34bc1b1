"""One comparison from flags to reports: wait for the servers, take turns, compare, print."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from tools.bench.compare.options import CompareOptions
from tools.bench.compare.page import render_page
from tools.bench.compare.report import COLUMNS, as_json, compared, print_outcomes
from tools.bench.compare.rounds import CompareRun, run_load, runs_of, server_runs
from tools.bench.connect import all_ready
from tools.output import write_json, write_text
from tools.tables import console_for


def run_session(options: CompareOptions) -> int:
    """Returns 1 if some run completed no request, else 0. An interrupted comparison is reported as far as it got."""
    runs: list[CompareRun] = []
    try:
        asyncio.run(measure(options, runs))
    except KeyboardInterrupt:
        if runs:
            print(f"bench: interrupted after {len(runs)} of {runs_of(options)} runs", file=sys.stderr)
            _report(options, runs)
        raise
    _report(options, runs)
    return 0 if all(run.report.completed for run in runs) else 1


def _report(options: CompareOptions, runs: Sequence[CompareRun]) -> None:
    outcomes = compared(runs, options.endpoints.names, options.endpoints.baseline)
    console = console_for(options.json_path, COLUMNS)
    print_outcomes(outcomes, options, runs, console)
    write_json(as_json(outcomes, options, runs), options.json_path)
    if options.html_path is not None:
        write_text(render_page(outcomes, options, runs), options.html_path)


async def measure(options: CompareOptions, runs: list[CompareRun]) -> None:
    """Adds each run to `runs` when it has ended, and prints a line on standard error: a comparison takes minutes."""
    await all_ready(options.endpoints)
    for server in server_runs(options.rounds, options.scenarios, options.endpoints.all):
        for load in server.scenario.loads:
            run = await run_load(options, server, load)
            runs.append(run)
            print(
                f"bench: {len(runs)}/{runs_of(options)} round {run.round + 1}, {load.name}, {run.endpoint}: "
                f"{run.report.completed} requests in {run.report.duration_s:.1f} s, {run.report.failed} failed",
                file=sys.stderr,
                flush=True,
            )
