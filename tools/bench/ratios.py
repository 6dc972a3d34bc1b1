"""Computes from runs what each contestant reached, and its ratio to the baseline, round by round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from tools.tables import Cell, Grid, Row, text_row

ReportT = TypeVar("ReportT")

CLEARLY = 0.05
"""A ratio is coloured where all rounds agree that it is at least this far from 1."""


@dataclass(frozen=True, slots=True)
class Metric(Generic[ReportT]):
    key: str
    label: str
    unit: str
    scale: float
    """Factor from the report's seconds to the unit that is shown."""
    more_is_better: bool
    adds_up: bool
    """Whether rounds are added up. Other metrics have a median over rounds."""
    read: Callable[[ReportT], float | None]
    has_ratio: bool = True
    """Whether a ratio to the baseline is shown. It means nothing where a value may have either sign."""


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
    """The results of one contestant under one load. A metric that no round has is absent."""

    name: str
    values: dict[str, Spread]
    ratios: dict[str, Spread]
    """Ratios to the baseline in the same round. Empty for the baseline itself."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    load: str
    outcomes: tuple[ContestantOutcome, ...]
    """Outcomes in the order of the names."""


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


def ratio_grid(
    outcome: LoadOutcome,
    baseline: str,
    metrics: Sequence[Metric[ReportT]],
    colours: Mapping[str, int] = MappingProxyType({}),
) -> Grid:
    """Returns the values of every contestant, then the ratios of the others to the baseline."""
    values = [
        text_row(
            each.name,
            *(_value(metric, each.values.get(metric.key)) for metric in metrics),
            colour=colours.get(each.name),
        )
        for each in outcome.outcomes
    ]
    ratios = [
        Row(None, (Cell(f"{each.name} / {baseline}"), *(_ratio_cell(metric, each) for metric in metrics)))
        for each in outcome.outcomes
        if each.name != baseline
    ]
    return Grid((Cell(""), *(Cell(metric.label, metric.unit) for metric in metrics)), (*values, *ratios))


def _value(metric: Metric[ReportT], spread: Spread | None) -> str:
    if spread is None:
        return "-"
    value = (spread.total if metric.adds_up else spread.median) * metric.scale
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _ratio_cell(metric: Metric[ReportT], outcome: ContestantOutcome) -> Cell:
    spread = outcome.ratios.get(metric.key)
    if spread is None:
        return Cell("")
    kind = ""
    if spread.low > 1 + CLEARLY:
        kind = "better" if metric.more_is_better else "worse"
    elif spread.high < 1 - CLEARLY:
        kind = "worse" if metric.more_is_better else "better"
    return Cell(f"{spread.median:.2f}x", f"{spread.low:.2f}..{spread.high:.2f}", kind)


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
