"""A comparison of policies as one HTML page: tables, and what they do not show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.values.worker_counts import LatencyTargets
from tools.figures.charts import (
    Figure,
    Head,
    Line,
    Section,
    Series,
    Words,
    bar_figure,
    colours_of,
    latency_figure,
    line_figure,
    render,
    scatter_figure,
)
from tools.simulate.fleet import results
from tools.simulate.fleet.results import SimulatedRun
from tools.simulate.loads import FoundRate
from tools.simulate.reports.report import explanation, rates_grid, summaries_grid
from tools.simulate.reports.summary import Summary
from twostroke.config import Role

LEAST_ERROR = 1e-3
"""Least error that is drawn: an axis of powers has no zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRuns:
    summaries: tuple[Summary, ...]
    runs: tuple[tuple[float, SimulatedRun], ...]
    """With their paces; beside the summaries."""
    rates: tuple[FoundRate, ...]
    oracle_rate: float


def render_page(shown: ComparedRuns, setting: str, promise: LatencyTargets) -> str:
    names = tuple(dict.fromkeys([each.variant for each in shown.summaries] + [each.variant for each in shown.rates]))
    colours = colours_of(names)
    sections = [
        *([_over_loads(shown, colours, promise)] if shown.summaries else []),
        *(_at_pace(shown, scale, colours) for scale in dict.fromkeys(each.rate_scale for each in shown.summaries)),
        *([_rates(shown.rates, colours)] if shown.rates else []),
    ]
    return render(Head("twostroke simulate", setting, names), sections)


def _over_loads(shown: ComparedRuns, colours: dict[str, int], promise: LatencyTargets) -> Section:
    by_variant = {variant: [each for each in shown.summaries if each.variant == variant] for variant in colours}
    paces = list(dict.fromkeys(each.rate_scale for each in shown.summaries))
    hits = [
        (
            f"x{scale:.3g}",
            [(colours[each.variant], each.hit_rate) for each in shown.summaries if each.rate_scale == scale],
        )
        for scale in paces
    ]
    hit_words = Words("hit rate by policy", "pace", "hit rate; dashed: oracle")
    return Section(
        "Load",
        explanation(promise, shown.oracle_rate),
        figures=(
            Figure("Time to first token over load: p90, dashed p50", _ttft_over_load(by_variant, colours)),
            Figure("Prompt tokens that were not computed", bar_figure(hits, hit_words, shown.oracle_rate)),
        ),
    )


def _ttft_over_load(by_variant: dict[str, list[Summary]], colours: dict[str, int]) -> str:
    lines = []
    for variant, summaries in by_variant.items():
        for dashed in (False, True):
            values = [(each, each.ttft_p50_s if dashed else each.ttft_p90_s) for each in summaries]
            points = tuple((each.requests_per_s, value) for each, value in values if value)
            lines.append(Line(colours[variant], points, dashed, f"{variant} {'p50' if dashed else 'p90'}"))
    return line_figure(lines, Words("time to first token over load", "requests/s", "s"), log_y=True)


def _at_pace(shown: ComparedRuns, scale: float, colours: dict[str, int]) -> Section:
    here = [each for each in shown.summaries if each.rate_scale == scale]
    runs = [run for pace, run in shown.runs if pace == scale]
    ttfts = [Series(colours[run.policy], tuple(results.ttfts(run))) for run in runs]
    return Section(
        f"{here[0].requests_per_s:.2f} requests/s (x{scale:.3g})",
        grid=summaries_grid(here, colours),
        figures=(
            Figure("Time to first token", latency_figure(ttfts)),
            Figure("Predicted (up) and actual time to first token, s", _predictions(runs, colours)),
            Figure("Error of the prediction over the share of requests below it", _errors(runs, colours)),
            Figure("Share of time on prompts, worker by worker", _busy(runs, colours)),
        ),
    )


def _predictions(runs: Sequence[SimulatedRun], colours: dict[str, int]) -> str:
    clouds = []
    for run in runs:
        points = tuple(
            (outcome.since_decision_s, outcome.predicted_ttft_s)
            for outcome in run.outcomes
            if outcome.since_decision_s and outcome.predicted_ttft_s
        )
        clouds.append(Line(colours[run.policy], points, name=run.policy))
    return scatter_figure(clouds, Words("predicted over actual time to first token", "actual", "predicted"))


def _errors(runs: Sequence[SimulatedRun], colours: dict[str, int]) -> str:
    """Quantiles of |error|; beyond the last tenth the axis would show nothing else."""
    shares = [number / 20 for number in range(19)]
    lines = []
    for run in runs:
        errors = [abs(error) for error in results.prediction_errors(run.outcomes)]
        quantiles = [(share, results.percentile(errors, share)) for share in shares]
        points = tuple((share, max(LEAST_ERROR, value)) for share, value in quantiles if value is not None)
        lines.append(Line(colours[run.policy], points, name=run.policy))
    words = Words("quantiles of the prediction's error", "share of requests", "|predicted/actual - 1|")
    return line_figure(lines, words, log_y=True)


def _busy(runs: Sequence[SimulatedRun], colours: dict[str, int]) -> str:
    groups = []
    for run in runs:
        roles = (Role.PREFILL, Role.DECODE)
        uses = sorted(
            (use for use in run.workers if use.prefill_s), key=lambda use: (roles.index(use.role), use.worker)
        )
        bars = [(colours[run.policy], use.prefill_span_s / run.span_s if run.span_s else 0.0) for use in uses]
        groups.append((run.policy, bars))
    return bar_figure(groups, Words("utilisation by worker", "a bar per worker", "share of time on prompts"))


def _rates(rates: Sequence[FoundRate], colours: dict[str, int]) -> Section:
    bars = [("", [(colours[each.variant], each.keeps or 0.0) for each in rates])]
    figure = Figure("Highest rate, requests/s", bar_figure(bars, Words("highest rate by policy", "", "requests/s")))
    return Section("Highest rate", grid=rates_grid(rates, colours), figures=(figure,))
