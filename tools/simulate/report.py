"""Summaries for people (a table) and for programs (JSON; times in seconds)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.scaling.capacity import LatencyTargets
from tools.simulate.loads import FoundRate
from tools.simulate.summary import Summary

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""
COLUMNS = 190
"""The table's width where no terminal says one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    title: str
    shown: Callable[[Summary], str]


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1%}"


COLUMNS_SHOWN = (
    Column("policy", lambda each: each.variant),
    Column("requests", lambda each: str(each.requests)),
    Column("done", lambda each: str(each.completed)),
    Column("refused", lambda each: str(each.refused)),
    Column("lost", lambda each: str(each.lost)),
    Column("util", lambda each: f"{each.utilisation:.3f}"),
    Column("TTFT p50", lambda each: seconds(each.ttft_p50_s)),
    Column("p90", lambda each: seconds(each.ttft_p90_s)),
    Column("p99", lambda each: seconds(each.ttft_p99_s)),
    Column("mean", lambda each: seconds(each.ttft_mean_s)),
    Column("p90/rr", lambda each: "-" if each.p90_ratio is None else f"{each.p90_ratio:.3f}x"),
    Column("ITL p50", lambda each: seconds(each.itl_p50_s)),
    Column("p99", lambda each: seconds(each.itl_p99_s)),
    Column("hits", lambda each: percent(each.hit_rate)),
    Column("of oracle", lambda each: percent(each.oracle_share)),
    Column("pulled", lambda each: tokens(each.pulled_tokens)),
    Column("good/s", lambda each: f"{each.goodput_per_s:.2f}"),
    Column("TTFT error", lambda each: percent(each.prediction_error)),
    Column("bias", lambda each: percent(each.prediction_bias, "+")),
    Column("ms/decision", lambda each: f"{each.decision_ms:.2f}"),
)


def tokens(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.0f}k" if count >= 1e3 else str(count)


def console_for(json_path: str | None) -> Console:
    """Standard error, where standard output is the JSON's."""
    out = sys.stderr if json_path == "-" else sys.stdout
    return Console(file=out, highlight=False, width=None if out.isatty() else COLUMNS)


def print_summaries(summaries: Sequence[Summary], console: Console) -> None:
    """A table for each pace."""
    for scale in dict.fromkeys(each.rate_scale for each in summaries):
        here = [each for each in summaries if each.rate_scale == scale]
        title = f"{here[0].requests_per_s:.2f} requests/s (x{scale:.3g})"
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for at, column in enumerate(COLUMNS_SHOWN):
            table.add_column(column.title, justify="right" if at else "left", no_wrap=True)
        for each in here:
            table.add_row(*(escape(column.shown(each)) for column in COLUMNS_SHOWN))
        console.print(table)


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


def print_rates(found: Sequence[FoundRate], ttft_s: float, console: Console) -> None:
    table = Table(
        title=f"highest rate with a p90 TTFT up to {ttft_s:g} s (all requests count)",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    base = found[0].keeps
    for at, heading in enumerate(("policy", "requests/s", f"over {found[0].variant}", "fails at", "p90", "util")):
        table.add_column(heading, justify="right" if at else "left", no_wrap=True)
    for each in found:
        table.add_row(
            escape(each.variant),
            "none" if each.keeps is None else f"{each.keeps:.2f}",
            f"{each.keeps / base:.2f}x" if each.keeps and base else "-",
            "-" if each.breaks is None else f"{each.breaks:.2f}",
            seconds(each.p90_s),
            "-" if each.utilisation is None else f"{each.utilisation:.3f}",
        )
    console.print(table)


def as_json(summaries: Sequence[Summary], found: Sequence[FoundRate], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "runs": [dataclasses.asdict(each) for each in summaries],
        "highest_rates": [dataclasses.asdict(each) for each in found],
    }
