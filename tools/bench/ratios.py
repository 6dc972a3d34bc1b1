"""Runs to numbers: what each contestant reached, and that over the baseline's, round by round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.markup import escape
from rich.table import Table

ReportT = TypeVar("ReportT")


@dataclass(frozen=True, slots=True)
class Metric(Generic[ReportT]):
    key: str
    label: str
    unit: str
    scale: float
    """From the report's seconds to the unit that is shown."""
    more_is_better: bool
    adds_up: bool
    """Over rounds, where others have a median."""
    read: Callable[[ReportT], float | None]
    has_ratio: bool = True
    """Over the baseline's, which says nothing where a value may have either sign."""


@dataclass(frozen=True, slots=True)
class Sample(Generic[ReportT]):
    """One contestant under one load in one round."""

    round: int
    load: str
    name: str
    report: ReportT


@dataclass(frozen=True, slots=True)
class Spread:
    """One number per round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def total(self) -> float:
        return sum(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True, slots=True)
class ContestantOutcome:
    """One contestant under one load. A metric that no round has is absent."""

    name: str
    values: dict[str, Spread]
    ratios: dict[str, Spread]
    """Over the baseline in the same round; empty for the baseline itself."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    load: str
    outcomes: tuple[ContestantOutcome, ...]
    """In the order of the names."""


def outcomes_of(
    samples: Sequence[Sample[ReportT]], names: Sequence[str], baseline: str, metrics: Sequence[Metric[ReportT]]
) -> list[LoadOutcome]:
    loads = dict.fromkeys(sample.load for sample in samples)
    return [
        LoadOutcome(
            load,
            tuple(_outcome([each for each in samples if each.load == load], name, baseline, metrics) for name in names),
        )
        for load in loads
    ]


def _outcome(
    samples: Sequence[Sample[ReportT]], name: str, baseline: str, metrics: Sequence[Metric[ReportT]]
) -> ContestantOutcome:
    own = {sample.round: sample.report for sample in samples if sample.name == name}
    base = {sample.round: sample.report for sample in samples if sample.name == baseline}
    values, ratios = {}, {}
    for metric in metrics:
        if spread := _spread(metric.read(report) for report in own.values()):
            values[metric.key] = spread
        pairs = [(metric.read(own[number]), metric.read(base[number])) for number in own if number in base]
        if name != baseline and metric.has_ratio and (spread := _spread(_ratio(*pair) for pair in pairs)):
            ratios[metric.key] = spread
    return ContestantOutcome(name, values, ratios)


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = tuple(value for value in values if value is not None)
    return Spread(known) if known else None


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


def _ratio_rows(
    outcome: ContestantOutcome, baseline: str, metrics: Sequence[Metric[ReportT]]
) -> list[tuple[str, list[str]]]:
    spreads = [outcome.ratios.get(metric.key) for metric in metrics]
    return [
        (f"{outcome.name} / {baseline}", [shown_ratio(spread) for spread in spreads]),
        ("", [f"[dim]{shown_range(spread)}[/dim]" for spread in spreads]),
    ]
