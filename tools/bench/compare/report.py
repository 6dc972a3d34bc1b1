"""A comparison for people (a table) and for programs (JSON; times in seconds)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from tools.bench.compare.options import CompareOptions
from tools.bench.compare.rounds import CompareRun, runs_of
from tools.bench.endpoints import Endpoint
from tools.bench.measure import Distribution, Report
from tools.bench.ratios import LoadOutcome, Metric, Sample, loads_json, outcomes_of, ratio_grid
from tools.tables import table_of

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""
COLUMNS = 130
"""The table's width where no terminal says one."""


def print_outcomes(
    outcomes: Sequence[LoadOutcome], options: CompareOptions, runs: Sequence[CompareRun], console: Console
) -> None:
    for outcome in outcomes:
        console.print(table_of(ratio_grid(outcome, options.endpoints.baseline, METRICS), outcome.load))
    console.print(f"[dim]{explanation(options, runs)}[/dim]")
    for note in notes_of(runs):
        console.print(f"note: {note}", markup=False)


def explanation(options: CompareOptions, runs: Sequence[CompareRun]) -> str:
    begun = 1 + max(run.round for run in runs)
    rounds = "one round" if begun == 1 else f"{begun} rounds"
    missing = runs_of(options) - len(runs)
    return ("" if not missing else f"Interrupted: {missing} of {runs_of(options)} runs are missing. ") + (
        f"Times in ms, output in tokens/s: medians over {rounds}, all errors. Ratios over {options.endpoints.baseline} "
        f"are taken within a round: their median, and from the lowest to the highest. Seed {options.endpoints.seed}."
    )


def as_json(outcomes: Sequence[LoadOutcome], options: CompareOptions, runs: Sequence[CompareRun]) -> dict[str, Any]:
    """Returns all ratios, and every run's report. No keys of servers."""
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
    target = dataclasses.asdict(endpoint.target)
    shown = {key: target[key] for key in ("model", "text", "chat", "ignore_eos", "temperature")}
    return {"name": endpoint.name, "endpoint": endpoint.target.name, **shown}


def _of(found: Distribution | None, read: Callable[[Distribution], float]) -> float | None:
    return None if found is None else read(found)


def _cached_share(report: Report) -> float | None:
    """Returns prompt tokens that were not computed, of those of completed requests."""
    return (
        None
        if report.cached_tokens is None or not report.prompt_tokens
        else report.cached_tokens / report.prompt_tokens
    )


METRICS: tuple[Metric[Report], ...] = (
    Metric("ttft_p50_s", "TTFT p50", "ms", 1e3, False, False, lambda report: _of(report.ttft_s, lambda d: d.p50)),
    Metric("ttft_p90_s", "TTFT p90", "ms", 1e3, False, False, lambda report: _of(report.ttft_s, lambda d: d.p90)),
    Metric("ttft_p99_s", "TTFT p99", "ms", 1e3, False, False, lambda report: _of(report.ttft_s, lambda d: d.p99)),
    Metric("tpot_mean_s", "TPOT mean", "ms", 1e3, False, False, lambda report: _of(report.tpot_s, lambda d: d.mean)),
    Metric("itl_p50_s", "ITL p50", "ms", 1e3, False, False, lambda report: _of(report.inter_token_s, lambda d: d.p50)),
    Metric("itl_p99_s", "ITL p99", "ms", 1e3, False, False, lambda report: _of(report.inter_token_s, lambda d: d.p99)),
    Metric("itl_max_s", "ITL max", "ms", 1e3, False, False, lambda report: _of(report.inter_token_s, lambda d: d.max)),
    Metric("output_tokens_per_s", "output", "tok/s", 1, True, False, lambda report: report.output_tokens_per_s),
    Metric("cached_share", "reused", "%", 1e2, True, False, _cached_share, has_ratio=False),
    Metric("failed", "errors", "", 1, False, True, lambda report: float(report.failed)),
)


def compared(runs: Sequence[CompareRun], names: Sequence[str], baseline: str) -> list[LoadOutcome]:
    """Returns the outcome of each load, with every endpoint in the order of the names."""
    samples = [Sample(run.round, run.load.name, run.endpoint, run.report) for run in runs]
    return outcomes_of(samples, names, baseline, METRICS)


def notes_of(runs: Sequence[CompareRun]) -> list[str]:
    """Returns what the runs themselves had to say, and their failures, each once per endpoint and load."""
    notes_found = [(f"{run.endpoint}: {note}", run.load.name) for run in runs for note in run.report.notes]
    notes_found += [
        (f"{run.endpoint}: {error.kind} ({error.example})", run.load.name)
        for run in runs
        for error in run.report.errors
    ]
    loads_of: dict[str, list[str]] = {}
    for note, load in dict.fromkeys(notes_found):
        loads_of.setdefault(note, []).append(load)
    return [f"{note} [{', '.join(loads)}]" for note, loads in loads_of.items()]
