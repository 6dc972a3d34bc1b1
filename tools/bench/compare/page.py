"""A comparison as one HTML file: nothing is fetched, and both light and dark screens can read it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from tools.bench.compare.options import CompareOptions
from tools.bench.compare.report import METRICS, explanation, notes_of
from tools.bench.compare.rounds import CompareRun
from tools.bench.measure import Record, Report
from tools.bench.ratios import ContestantOutcome, LoadOutcome, Metric, shown_range, shown_ratio, shown_value
from tools.figures.charts import (
    BOTTOM,
    COLOURS,
    LEAST_STEP,
    LEFT,
    RIGHT,
    TOP,
    Axis,
    Series,
    grid,
    label,
    latency_figure,
    linear_axis,
    rendered,
    svg,
)

CLEARLY = 0.05
"""A ratio is coloured where all rounds agree that it is at least this far from 1."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    detail: str = ""
    kind: str = ""
    """"better" or "worse" than the baseline in every round."""


@dataclass(frozen=True, slots=True)
class CompareRow:
    title: str
    colour: int | None
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    endpoint: str
    figure: Markup


@dataclass(frozen=True, slots=True)
class CompareSection:
    load: str
    rows: tuple[CompareRow, ...]
    first_token: Markup
    inter_token: Markup
    timelines: tuple[Timeline, ...]
    timeline_round: int


def render_page(outcomes: Sequence[LoadOutcome], options: CompareOptions, runs: Sequence[CompareRun]) -> str:
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


def _section(outcome: LoadOutcome, options: CompareOptions, runs: Sequence[CompareRun]) -> CompareSection:
    names = options.endpoints.names
    of_load = [run for run in runs if run.load.name == outcome.load]
    last = {run.endpoint: run for run in of_load}
    records_of = {name: [record for run in of_load if run.endpoint == name for record in run.records] for name in names}
    span_s = max(span_of(run.records) for run in last.values())
    colour_of = {name: number % COLOURS for number, name in enumerate(names)}
    first = [Series(colour_of[name], first_token_samples(records_of[name])) for name in names]
    between = [Series(colour_of[name], inter_token_samples(records_of[name])) for name in names]
    return CompareSection(
        load=outcome.load,
        rows=tuple(_rows(outcome, options.endpoints.baseline, colour_of)),
        first_token=Markup(latency_figure(first)),
        inter_token=Markup(latency_figure(between)),
        timelines=tuple(
            Timeline(name, Markup(timeline_figure(run.records, colour_of[name], span_s))) for name, run in last.items()
        ),
        timeline_round=1 + max(run.round for run in last.values()),
    )


def _rows(outcome: LoadOutcome, baseline: str, colour_of: dict[str, int]) -> list[CompareRow]:
    rows = [
        CompareRow(
            each.name,
            colour_of[each.name],
            tuple(Cell(shown_value(metric, each.values.get(metric.key))) for metric in METRICS),
        )
        for each in outcome.outcomes
    ]
    others = [each for each in outcome.outcomes if each.name != baseline]
    return rows + [
        CompareRow(f"{each.name} / {baseline}", None, tuple(_ratio_cell(metric, each) for metric in METRICS))
        for each in others
    ]


def _ratio_cell(metric: Metric[Report], outcome: ContestantOutcome) -> Cell:
    spread = outcome.ratios.get(metric.key)
    if spread is None:
        return Cell("")
    kind = ""
    if spread.low > 1 + CLEARLY:
        kind = "better" if metric.more_is_better else "worse"
    elif spread.high < 1 - CLEARLY:
        kind = "worse" if metric.more_is_better else "better"
    return Cell(shown_ratio(spread), shown_range(spread), kind)


MOST_LANES = 32
"""Requests drawn of one run."""


def timeline_figure(records: Sequence[Record], endpoint: int, span_s: float, width: int = 960) -> str:
    """A lane per request: a bar from its sending to its first token, then a tick per event with tokens."""
    shown = sorted(records, key=lambda record: record.answer.sent_at_s)[:MOST_LANES]
    start_s = shown[0].answer.sent_at_s if shown else 0.0
    lane = 13 if len(shown) <= 16 else 8
    height = TOP + lane * len(shown) + BOTTOM
    x = linear_axis(span_s, (LEFT, width - RIGHT))
    parts = [grid(x, None, width, height), label(width - RIGHT, height - 2, "seconds", "end")]
    for row, record in enumerate(shown):
        parts += _lane(record, endpoint, start_s, TOP + lane * row, lane - 3, x)
    return svg(parts, width, height, "requests over time")


def span_of(records: Iterable[Record]) -> float:
    """Seconds from the first request sent to the last answer's end."""
    answers = [record.answer for record in records]
    return max(answer.ended_at_s for answer in answers) - min(answer.sent_at_s for answer in answers)


def inter_token_samples(records: Iterable[Record]) -> tuple[float, ...]:
    done = (record.answer for record in records if record.answer.failure is None)
    return tuple(later - earlier for answer in done for earlier, later in pairwise(answer.event_times_s))


def first_token_samples(records: Iterable[Record]) -> tuple[float, ...]:
    done = (record.answer for record in records if record.answer.failure is None and record.answer.event_times_s)
    return tuple(answer.event_times_s[0] - answer.sent_at_s for answer in done)


def _lane(record: Record, endpoint: int, start_s: float, top: float, tall: float, x: Axis) -> list[str]:
    answer = record.answer
    sent = x.at(answer.sent_at_s - start_s)
    first_s = answer.event_times_s[0] if answer.event_times_s else answer.ended_at_s
    first = x.at(first_s - start_s)
    title = f"request {record.planned.index}: first token after {1e3 * (first_s - answer.sent_at_s):.0f} ms"
    parts = [
        f'<rect class="wait e{endpoint}" x="{sent:.1f}" y="{top:.1f}" width="{max(0.5, first - sent):.1f}" '
        f'height="{tall:.1f}"><title>{title}</title></rect>'
    ]
    ticks = "".join(f"M{at:.1f} {top:.1f}v{tall:.1f}" for at in _apart(x.at(t - start_s) for t in answer.event_times_s))
    if ticks:
        parts.append(f'<path class="tick e{endpoint}" d="{ticks}"/>')
    if answer.failure is not None:
        parts.append(
            label(x.at(answer.ended_at_s - start_s), top + tall, f"failed: {answer.failure.kind}", "end", "bad")
        )
    return parts


def _apart(places: Iterable[float]) -> Iterable[float]:
    last = -1.0
    for place in places:
        if place - last >= LEAST_STEP:
            last = place
            yield place
