"""One comparison from flags to reports: wait for the servers, take turns, compare, print."""

from __future__ import annotations

import asyncio
import sys

from rich.console import Console

from cluster.checks import STDOUT
from cluster.output import write_json, write_text
from tools.bench.compare.options import CompareOptions
from tools.bench.compare.page import render_page
from tools.bench.compare.ratios import compared
from tools.bench.compare.report import COLUMNS, as_json, print_outcomes
from tools.bench.compare.rounds import OnRun, Run, take_turns
from tools.bench.connect import allow_many_sockets, wait_until_ready


def run_session(options: CompareOptions) -> int:
    """Exit code: 1 if some run completed no request."""
    runs = asyncio.run(measure(options))
    outcomes = compared(runs, options.endpoints.names, options.endpoints.baseline)
    console = Console(stderr=options.json_path == STDOUT)
    if not console.is_terminal:
        console.width = COLUMNS
    print_outcomes(outcomes, options, runs, console)
    write_json(as_json(outcomes, options, runs), options.json_path)
    if options.html_path is not None:
        write_text(render_page(outcomes, options, runs), options.html_path)
    return 0 if all(run.report.completed for run in runs) else 1


async def measure(options: CompareOptions) -> list[Run]:
    allow_many_sockets()
    endpoints = options.endpoints
    for endpoint in endpoints.all:
        await wait_until_ready(endpoint.target, endpoints.seed, endpoints.vocab_size, endpoints.wait_s)
    return await take_turns(options, _narrator(options))


def _narrator(options: CompareOptions) -> OnRun:
    """A line per run on standard error: a comparison takes minutes."""
    total = options.rounds * len(options.endpoints.all) * sum(len(scenario.loads) for scenario in options.scenarios)
    ended = 0

    def say(run: Run) -> None:
        nonlocal ended
        ended += 1
        report = run.report
        print(
            f"bench: {ended}/{total} round {run.round + 1}, {run.load.name}, {run.endpoint}: "
            f"{report.completed} requests in {report.duration_s:.1f} s, {report.failed} failed",
            file=sys.stderr,
            flush=True,
        )

    return say
