"""A comparison for people (a table) and for programs (JSON; times in seconds)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from tools.bench.compare.options import CompareOptions
from tools.bench.compare.ratios import METRICS, notes_of
from tools.bench.compare.rounds import Run, runs_of
from tools.bench.endpoints import Endpoint
from tools.bench.ratio_table import loads_json, ratio_table
from tools.bench.ratios import LoadOutcome

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""
COLUMNS = 130
"""The table's width where no terminal says one."""


def print_outcomes(
    outcomes: Sequence[LoadOutcome], options: CompareOptions, runs: Sequence[Run], console: Console
) -> None:
    for outcome in outcomes:
        console.print(ratio_table(outcome, options.endpoints.baseline, METRICS))
    console.print(f"[dim]{explanation(options, runs)}[/dim]", highlight=False)
    for note in notes_of(runs):
        console.print(f"note: {note}", highlight=False, markup=False)


def explanation(options: CompareOptions, runs: Sequence[Run]) -> str:
    begun = 1 + max(run.round for run in runs)
    rounds = "one round" if begun == 1 else f"{begun} rounds"
    missing = runs_of(options) - len(runs)
    return ("" if not missing else f"Interrupted: {missing} of {runs_of(options)} runs are missing. ") + (
        f"Times in ms, output in tokens/s: medians over {rounds}, all errors. Ratios over {options.endpoints.baseline} "
        f"are taken within a round: their median, and from the lowest to the highest. Seed {options.endpoints.seed}."
    )


def as_json(outcomes: Sequence[LoadOutcome], options: CompareOptions, runs: Sequence[Run]) -> dict[str, Any]:
    """All ratios, and every run's report. No keys of servers."""
    return {
        "schema_version": SCHEMA_VERSION,
        "endpoints": [_described(endpoint) for endpoint in options.endpoints.all],
        "baseline": options.endpoints.baseline,
        "seed": options.endpoints.seed,
        "rounds": options.rounds,
        "missing_runs": runs_of(options) - len(runs),
        "loads": loads_json(outcomes),
        "notes": notes_of(runs),
        "runs": [
            {"round": run.round, "load": run.load.name, "endpoint": run.endpoint, **dataclasses.asdict(run.report)}
            for run in runs
        ],
    }


def _described(endpoint: Endpoint) -> dict[str, Any]:
    target = endpoint.target
    return {
        "name": endpoint.name,
        "endpoint": target.name,
        "model": target.model,
        "text": target.text,
        "chat": target.chat,
        "ignore_eos": target.ignore_eos,
        "temperature": target.temperature,
    }
