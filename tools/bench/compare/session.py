"""One comparison from flags to reports: wait for the servers, take turns, compare, print."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from tools.bench.compare.options import CompareOptions
from tools.bench.compare.page import render_page
from tools.bench.compare.report import COLUMNS, as_json, compared, print_outcomes
from tools.bench.compare.rounds import CompareRun, OnRun, runs_of, take_turns
from tools.bench.connect import allow_many_sockets, wait_until_ready
from tools.output import write_json, write_text
from tools.tables import console_for


def run_session(options: CompareOptions) -> int:
    """Exit code: 1 if some run completed no request. Who interrupts it gets what has been measured until then."""
    runs: list[CompareRun] = []
    try:
        asyncio.run(measure(options, runs.append))
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


async def measure(options: CompareOptions, on_run: OnRun) -> None:
    allow_many_sockets()
    endpoints = options.endpoints
    for endpoint in endpoints.all:
        await wait_until_ready(endpoint.target, endpoints.seed, endpoints.vocab_size, endpoints.wait_s)
    tell = _narrator(options)

    def ended(run: CompareRun) -> None:
        on_run(run)
        tell(run)

    await take_turns(options, ended)


def _narrator(options: CompareOptions) -> OnRun:
    """A line per run on standard error: a comparison takes minutes."""
    ended = 0

    def say(run: CompareRun) -> None:
        nonlocal ended
        ended += 1
        report = run.report
        print(
            f"bench: {ended}/{runs_of(options)} round {run.round + 1}, {run.load.name}, {run.endpoint}: "
            f"{report.completed} requests in {report.duration_s:.1f} s, {report.failed} failed",
            file=sys.stderr,
            flush=True,
        )

    return say
