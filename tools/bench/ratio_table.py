"""Values and ratios for people (a table for each load) and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from tools.bench.ratios import LoadOutcome, Metric, Outcome, ReportT, Spread


def ratio_table(outcome: LoadOutcome, baseline: str, metrics: Sequence[Metric[ReportT]]) -> Table:
    table = Table(title=escape(outcome.load), title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("")
    for metric in metrics:
        table.add_column(metric.label, justify="right", no_wrap=True)
    for each in outcome.outcomes:
        table.add_row(escape(each.name), *(shown_value(metric, each.values.get(metric.key)) for metric in metrics))
    for each in outcome.outcomes:
        if each.name != baseline:
            for label, row in _ratio_rows(each, baseline, metrics):
                table.add_row(f"[dim]{escape(label)}[/dim]", *row)
    return table


def shown_value(metric: Metric[ReportT], spread: Spread | None) -> str:
    if spread is None:
        return "-"
    value = (spread.total if metric.adds_up else spread.median) * metric.scale
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def shown_ratio(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f}x"


def shown_range(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.low:.2f}..{spread.high:.2f}"


def loads_json(outcomes: Sequence[LoadOutcome]) -> list[dict[str, Any]]:
    return [
        {
            "load": outcome.load,
            "endpoints": {
                each.name: {"values": _spreads(each.values), "ratios": _spreads(each.ratios)}
                for each in outcome.outcomes
            },
        }
        for outcome in outcomes
    ]


def _spreads(spreads: dict[str, Spread]) -> dict[str, Any]:
    return {
        key: {"median": spread.median, "min": spread.low, "max": spread.high, "rounds": list(spread.values)}
        for key, spread in spreads.items()
    }


def _ratio_rows(outcome: Outcome, baseline: str, metrics: Sequence[Metric[ReportT]]) -> list[tuple[str, list[str]]]:
    spreads = [outcome.ratios.get(metric.key) for metric in metrics]
    return [
        (f"{outcome.name} / {baseline}", [shown_ratio(spread) for spread in spreads]),
        ("", [f"[dim]{shown_range(spread)}[/dim]" for spread in spreads]),
    ]
