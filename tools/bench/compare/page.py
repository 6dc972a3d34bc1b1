"""A comparison as one HTML file: nothing is fetched, and both light and dark screens can read it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tools.bench.compare.figures import (
    MOST_LANES,
    first_token_samples,
    inter_token_samples,
    span_of,
    timeline_figure,
)
from tools.bench.compare.options import CompareOptions
from tools.bench.compare.ratios import METRICS, notes_of
from tools.bench.compare.report import explanation
from tools.bench.compare.rounds import Run
from tools.bench.measure import Report
from tools.bench.ratio_table import shown_range, shown_ratio, shown_value
from tools.bench.ratios import LoadOutcome, Metric, Outcome
from tools.figures.charts import Series, latency_figure
from tools.figures.page import COLOURS, rendered

CLEARLY = 0.05
"""A ratio is coloured where all rounds agree that it is at least this far from 1."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    detail: str = ""
    kind: str = ""
    """"better" or "worse" than the baseline in every round."""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    colour: int | None
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    endpoint: str
    figure: Markup


@dataclass(frozen=True, slots=True)
class Section:
    load: str
    rows: tuple[Row, ...]
    first_token: Markup
    inter_token: Markup
    timelines: tuple[Timeline, ...]
    timeline_round: int


def render_page(outcomes: Sequence[LoadOutcome], options: CompareOptions, runs: Sequence[Run]) -> str:
    return rendered(
        "tools.bench.compare",
        endpoints=[(endpoint.name, endpoint.target.name) for endpoint in options.endpoints.all],
        explanation=explanation(options, runs),
        made_at=time.strftime("%Y-%m-%d %H:%M"),
        metrics=METRICS,
        most_lanes=MOST_LANES,
        notes=notes_of(runs),
        sections=[_section(outcome, options, runs) for outcome in outcomes],
    )


def _section(outcome: LoadOutcome, options: CompareOptions, runs: Sequence[Run]) -> Section:
    names = options.endpoints.names
    of_load = [run for run in runs if run.load.name == outcome.load]
    last = {run.endpoint: run for run in of_load}
    records_of = {name: [record for run in of_load if run.endpoint == name for record in run.records] for name in names}
    span_s = max(span_of(run.records) for run in last.values())
    colour_of = {name: number % COLOURS for number, name in enumerate(names)}
    first = [Series(colour_of[name], first_token_samples(records_of[name])) for name in names]
    between = [Series(colour_of[name], inter_token_samples(records_of[name])) for name in names]
    return Section(
        load=outcome.load,
        rows=tuple(_rows(outcome, options.endpoints.baseline, colour_of)),
        first_token=Markup(latency_figure(first)),
        inter_token=Markup(latency_figure(between)),
        timelines=tuple(
            Timeline(name, Markup(timeline_figure(run.records, colour_of[name], span_s))) for name, run in last.items()
        ),
        timeline_round=1 + max(run.round for run in last.values()),
    )


def _rows(outcome: LoadOutcome, baseline: str, colour_of: dict[str, int]) -> list[Row]:
    rows = [
        Row(
            each.name,
            colour_of[each.name],
            tuple(Cell(shown_value(metric, each.values.get(metric.key))) for metric in METRICS),
        )
        for each in outcome.outcomes
    ]
    others = [each for each in outcome.outcomes if each.name != baseline]
    return rows + [
        Row(f"{each.name} / {baseline}", None, tuple(_ratio_cell(metric, each) for metric in METRICS))
        for each in others
    ]


def _ratio_cell(metric: Metric[Report], outcome: Outcome) -> Cell:
    spread = outcome.ratios.get(metric.key)
    if spread is None:
        return Cell("")
    kind = ""
    if spread.low > 1 + CLEARLY:
        kind = "better" if metric.more_is_better else "worse"
    elif spread.high < 1 - CLEARLY:
        kind = "worse" if metric.more_is_better else "better"
    return Cell(shown_ratio(spread), shown_range(spread), kind)
