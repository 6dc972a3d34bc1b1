"""A comparison as one HTML file, with figures of all rounds and of every request of the last one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tools.bench.compare.options import CompareOptions
from tools.bench.compare.report import METRICS, explanation, notes_of
from tools.bench.compare.rounds import CompareRun
from tools.bench.measure import Record
from tools.bench.ratios import CLEARLY, LoadOutcome, ratio_grid
from tools.figures.charts import (
    INK,
    PALETTE,
    Figure,
    Head,
    Section,
    Series,
    Words,
    colours_of,
    latency_figure,
    new_axes,
    render,
    svg_of,
)


def render_page(outcomes: Sequence[LoadOutcome], options: CompareOptions, runs: Sequence[CompareRun]) -> str:
    names, notes = options.endpoints.names, notes_of(runs)
    clearly = f"Green and red: every round agrees that the ratio is better or worse by more than {CLEARLY:.0%}."
    addresses = tuple(f"{endpoint.name}: {endpoint.target.name}" for endpoint in options.endpoints.all)
    sections = [
        Section("Endpoints", items=addresses),
        *([Section("Notes", items=tuple(notes))] if notes else []),
        *(_section(outcome, options, runs) for outcome in outcomes),
    ]
    return render(Head(" / ".join(names), f"{explanation(options, runs)} {clearly}", names), sections)


def _section(outcome: LoadOutcome, options: CompareOptions, runs: Sequence[CompareRun]) -> Section:
    names = options.endpoints.names
    of_load = [run for run in runs if run.load.name == outcome.load]
    last = {run.endpoint: run for run in of_load}
    records_of = {name: [record for run in of_load if run.endpoint == name for record in run.records] for name in names}
    span_s, last_round = max(span_of(run.records) for run in last.values()), max(run.round for run in last.values())
    colours = colours_of(names)
    first = [Series(colours[name], first_token_samples(records_of[name])) for name in names]
    between = [Series(colours[name], inter_token_samples(records_of[name])) for name in names]
    return Section(
        outcome.load,
        f"In the lanes, a pale bar goes from the sending of a request to its first token (waiting and prefill). Ticks "
        f"are events with tokens; a gap under somebody else's bar is a stall. At most {MOST_LANES} requests are drawn.",
        grid=ratio_grid(outcome, options.endpoints.baseline, METRICS, colours),
        figures=(
            Figure("Time to first token, all rounds", latency_figure(first)),
            Figure("Between tokens, all rounds", latency_figure(between)),
        ),
        wide_figures=tuple(
            Figure(
                f"{name}, round {last_round + 1}: a lane per request",
                timeline_figure(run.records, colours[name], span_s),
            )
            for name, run in last.items()
        ),
    )


MOST_LANES = 32
"""Requests drawn of one run."""


LEAST_STEP = 1 / 2000
"""Part of a figure's width: events that are nearer to the one before are not drawn."""


def timeline_figure(records: Sequence[Record], endpoint: int, span_s: float) -> str:
    """Returns a lane per request: a bar from its sending to its first token, then a tick per event with tokens."""
    shown = sorted(records, key=lambda record: record.answer.sent_at_s)[:MOST_LANES]
    start_s = shown[0].answer.sent_at_s if shown else 0.0
    axes = new_axes(Words("requests over time", "seconds", ""), (9.6, 0.5 + 0.12 * len(shown)))
    for row, record in enumerate(shown):
        answer = record.answer
        first_s = answer.event_times_s[0] if answer.event_times_s else answer.ended_at_s
        wait_s = first_s - answer.sent_at_s
        axes.barh(row, wait_s, 0.8, answer.sent_at_s - start_s, color=PALETTE[endpoint], alpha=0.28)
        ticks = [at - start_s for at in _apart(answer.event_times_s, span_s * LEAST_STEP)]
        axes.plot(ticks, [row] * len(ticks), "|", color=PALETTE[endpoint], markersize=6, markeredgewidth=0.8)
        if answer.failure is not None:
            label = f"failed: {answer.failure.kind}"
            axes.text(answer.ended_at_s - start_s, row, label, ha="right", va="center", fontsize=7, color=INK)
    axes.set(xlim=(0, span_s or 1.0), ylim=(max(1, len(shown)) - 0.5, -0.5), yticks=[])
    return svg_of(axes)


def span_of(records: Iterable[Record]) -> float:
    """Returns seconds from the first request sent to the last answer's end."""
    answers = [record.answer for record in records]
    return max(answer.ended_at_s for answer in answers) - min(answer.sent_at_s for answer in answers)


def inter_token_samples(records: Iterable[Record]) -> tuple[float, ...]:
    done = (record.answer for record in records if record.answer.failure is None)
    return tuple(later - earlier for answer in done for earlier, later in pairwise(answer.event_times_s))


def first_token_samples(records: Iterable[Record]) -> tuple[float, ...]:
    done = (record.answer for record in records if record.answer.failure is None and record.answer.event_times_s)
    return tuple(answer.event_times_s[0] - answer.sent_at_s for answer in done)


def _apart(places: Iterable[float], least: float) -> Iterable[float]:
    last = -math.inf
    for place in places:
        if place - last >= least:
            last = place
            yield place
