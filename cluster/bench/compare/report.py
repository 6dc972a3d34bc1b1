"""A comparison for people (a table) and for programs (JSON; times in seconds)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.bench.compare.options import CompareOptions
from cluster.bench.compare.ratios import METRICS, LoadOutcome, Metric, Outcome, Spread, notes_of
from cluster.bench.compare.rounds import Run
from cluster.bench.endpoints import Endpoint

SCHEMA_VERSION = 1
"""Of the JSON; raised when a key changes its meaning."""
COLUMNS = 130
"""The table's width where no terminal says one."""


def print_outcomes(
    outcomes: Sequence[LoadOutcome], options: CompareOptions, runs: Sequence[Run], console: Console
) -> None:
    for outcome in outcomes:
        console.print(_table(outcome, options.endpoints.baseline))
    console.print(f"[dim]{explanation(options)}[/dim]", highlight=False)
    for note in notes_of(runs):
        console.print(f"note: {note}", highlight=False, markup=False)


def explanation(options: CompareOptions) -> str:
    rounds = "one round" if options.rounds == 1 else f"{options.rounds} rounds"
    return (
        f"Times in ms, output in tokens/s: medians over {rounds}, all errors. Ratios over {options.endpoints.baseline} "
        f"are taken within a round: their median, and from the lowest to the highest. Seed {options.endpoints.seed}."
    )


def shown_value(metric: Metric, spread: Spread | None) -> str:
    if spread is None:
        return "-"
    value = (spread.total if metric.adds_up else spread.median) * metric.scale
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def shown_ratio(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f}x"


def shown_range(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.low:.2f}..{spread.high:.2f}"


def as_json(outcomes: Sequence[LoadOutcome], options: CompareOptions, runs: Sequence[Run]) -> dict[str, Any]:
    """All ratios, and every run's report. No keys of servers."""
    return {
        "schema_version": SCHEMA_VERSION,
        "endpoints": [_described(endpoint) for endpoint in options.endpoints.all],
        "baseline": options.endpoints.baseline,
        "seed": options.endpoints.seed,
        "rounds": options.rounds,
        "loads": [
            {
                "load": outcome.load,
                "endpoints": {
                    each.endpoint: {"values": _spreads(each.values), "ratios": _spreads(each.ratios)}
                    for each in outcome.outcomes
                },
            }
            for outcome in outcomes
        ],
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


def _spreads(spreads: dict[str, Spread]) -> dict[str, Any]:
    return {
        key: {"median": spread.median, "min": spread.low, "max": spread.high, "rounds": list(spread.values)}
        for key, spread in spreads.items()
    }


def _table(outcome: LoadOutcome, baseline: str) -> Table:
    table = Table(title=escape(outcome.load), title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("")
    for metric in METRICS:
        table.add_column(metric.label, justify="right", no_wrap=True)
    for each in outcome.outcomes:
        table.add_row(escape(each.endpoint), *(shown_value(metric, each.values.get(metric.key)) for metric in METRICS))
    for each in outcome.outcomes:
        if each.endpoint != baseline:
            for label, row in _ratio_rows(each, baseline):
                table.add_row(f"[dim]{escape(label)}[/dim]", *row)
    return table


def _ratio_rows(outcome: Outcome, baseline: str) -> list[tuple[str, list[str]]]:
    spreads = [outcome.ratios.get(metric.key) for metric in METRICS]
    return [
        (f"{outcome.endpoint} / {baseline}", [shown_ratio(spread) for spread in spreads]),
        ("", [f"[dim]{shown_range(spread)}[/dim]" for spread in spreads]),
    ]
