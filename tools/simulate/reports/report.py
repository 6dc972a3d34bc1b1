"""Summaries for people (a table) and for programs (JSON; times in seconds)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Console

from cluster.values.worker_counts import LatencyTargets
from tools.simulate.loads import FoundRate
from tools.simulate.reports.summary import Summary
from tools.tables import Grid, table_of, text_grid, text_row

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""
NO_COLOURS: Mapping[str, int] = MappingProxyType({})


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1%}"


COLUMNS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("policy", lambda each: each.variant),
    ("requests", lambda each: str(each.requests)),
    ("done", lambda each: str(each.completed)),
    ("refused", lambda each: str(each.refused)),
    ("lost", lambda each: str(each.lost)),
    ("util", lambda each: f"{each.utilisation:.3f}"),
    ("TTFT p50", lambda each: seconds(each.ttft_p50_s)),
    ("p90", lambda each: seconds(each.ttft_p90_s)),
    ("p99", lambda each: seconds(each.ttft_p99_s)),
    ("mean", lambda each: seconds(each.ttft_mean_s)),
    ("p90/rr", lambda each: "-" if each.p90_ratio is None else f"{each.p90_ratio:.3f}x"),
    ("ITL p50", lambda each: seconds(each.itl_p50_s)),
    ("p99", lambda each: seconds(each.itl_p99_s)),
    ("mean", lambda each: seconds(each.itl_mean_s)),
    ("hits", lambda each: percent(each.hit_rate)),
    ("of oracle", lambda each: percent(each.oracle_share)),
    ("host", lambda each: percent(each.host_rate)),
    ("disk", lambda each: percent(each.disk_rate)),
    ("pulled", lambda each: tokens(each.pulled_tokens)),
    ("good/s", lambda each: f"{each.goodput_per_s:.2f}"),
    ("TTFT error", lambda each: percent(each.prediction_error)),
    ("bias", lambda each: percent(each.prediction_bias, "+")),
    ("ms/decision", lambda each: f"{each.decision_ms:.2f}"),
)


def tokens(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.0f}k" if count >= 1e3 else str(count)


def print_summaries(summaries: Sequence[Summary], console: Console) -> None:
    """Prints a table for each pace."""
    for scale in dict.fromkeys(each.rate_scale for each in summaries):
        here = [each for each in summaries if each.rate_scale == scale]
        title = f"{here[0].requests_per_s:.2f} requests/s (x{scale:.3g})"
        console.print(table_of(summaries_grid(here), title))


def summaries_grid(summaries: Sequence[Summary], colours: Mapping[str, int] = NO_COLOURS) -> Grid:
    rows = (text_row(*(shown(each) for _, shown in COLUMNS), colour=colours.get(each.variant)) for each in summaries)
    return text_grid((title for title, _ in COLUMNS), rows)


def explanation(promise: LatencyTargets, oracle_rate: float) -> str:
    limits = [
        *([f"a first token within {promise.ttft_s:g} s"] if promise.ttft_s is not None else []),
        *([f"{promise.itl_s:g} s between tokens on average"] if promise.itl_s is not None else []),
    ]
    good = f"good/s: requests per second with {' and '.join(limits)}" if limits else "good/s: completed per second"
    return (
        f"Times in seconds; util: share of prefill workers' time from first to last arrival; the oracle (one LRU "
        f"cache of all prefill workers' pages, in arrival order) hits {oracle_rate:.1%} of prompt tokens; pulled: "
        f"tokens from peers; {good}; TTFT error: median of |predicted / actual - 1|, bias: with its sign."
    )


def notes_of(summaries: Sequence[Summary]) -> list[str]:
    notes = []
    for each in summaries:
        what = f"{each.variant} at x{each.rate_scale:.3g}"
        if each.event_gaps or each.divergences:
            counts = f"{each.event_gaps} gaps, {each.snapshots} snapshots, {each.divergences} divergences found"
            notes.append(f"{what}: events had {counts}")
        if each.unequal_indexes:
            notes.append(f"{what}: {each.unequal_indexes} indexes differ from their worker's blocks at the end")
    return notes


def rates_grid(found: Sequence[FoundRate], colours: Mapping[str, int] = NO_COLOURS) -> Grid:
    base = found[0].keeps
    rows = (
        text_row(
            each.variant,
            "none" if each.keeps is None else f"{each.keeps:.2f}",
            f"{each.keeps / base:.2f}x" if each.keeps and base else "-",
            "-" if each.breaks is None else f"{each.breaks:.2f}",
            seconds(each.p90_s),
            "-" if each.utilisation is None else f"{each.utilisation:.3f}",
            colour=colours.get(each.variant),
        )
        for each in found
    )
    return text_grid(("policy", "requests/s", f"over {found[0].variant}", "fails at", "p90", "util"), rows)


def as_json(summaries: Sequence[Summary], found: Sequence[FoundRate], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "runs": [dataclasses.asdict(each) for each in summaries],
        "highest_rates": [dataclasses.asdict(each) for each in found],
    }
