"""A report for people (a table) and for programs (JSON; times in seconds)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tools.bench.measure import Report
from tools.bench.options import BenchOptions, Target
from tools.tables import Grid, table_of, text_grid, text_row

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""

REFUSALS = {"http 400", "http 422"}
"""How servers answer a body of an unknown form."""


def print_report(report: Report, title: str, console: Console) -> None:
    console.print(f"[bold]{escape(title)}[/bold]", highlight=False)
    console.print(_totals(report))
    console.print(table_of(_latencies(report), "milliseconds"))
    for error in report.errors:
        console.print(
            f"[red]{error.count} failed: {escape(error.kind)}[/red] ({escape(error.example)})", highlight=False
        )
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def describe(options: BenchOptions) -> str:
    """Returns what was sent where, in a line."""
    work, replay = options.prompts, options.replay
    if options.pace.concurrency is not None:
        pace = f"{options.pace.concurrency} open at once"
    elif options.pace.rate is not None:
        pace = f"{options.pace.rate:g} requests/s, {options.pace.arrivals}"
    else:
        jitter = f"jitter {replay.trace_jitter_s:g} s" if replay.trace_jitter_s else "raw bursts"
        pace = f"recorded times x {replay.trace_scale:g}, {jitter}"
    if replay.trace is not None:
        return f"{options.target.name}: {Path(replay.trace).name}, lengths x {replay.trace_length_scale:g}; {pace}"
    shared = (
        f" ({work.shared_prefix_tokens} shared by {_plural(work.prefix_groups)})" if work.shared_prefix_tokens else ""
    )
    spread = f" +-{work.prompt_spread:.0%}" if work.prompt_spread else ""
    return f"{options.target.name}: {work.prompt_tokens}{spread}{shared} -> {work.output_tokens} tokens; {pace}"


def advice(report: Report, options: BenchOptions) -> str | None:
    """Returns what to try when nothing worked."""
    if report.completed or not form_is_refused({error.kind for error in report.errors}, options.target):
        return None
    return "a server that takes no token ids as prompt needs --text; one that refuses unknown fields, --no-ignore-eos"


def form_is_refused(failures: set[str], target: Target) -> bool:
    """Returns whether the server does not know this form of a request, and another form is left to try."""
    return failures <= REFUSALS and target.grpc is None and not target.sends_text


def as_json(report: Report, options: BenchOptions) -> dict[str, Any]:
    """Returns everything in the report and all flags but the key and certificates."""
    target = {key: value for key, value in dataclasses.asdict(options.target).items() if key not in ("api_key", "tls")}
    return {
        "schema_version": SCHEMA_VERSION,
        "endpoint": options.target.name,
        "load": describe(options),
        "options": {
            **target,
            **options.prompts.model_dump(),
            **options.replay.model_dump(),
            **options.pace.model_dump(exclude={"json_path"}),
        },
        **dataclasses.asdict(report),
    }


def _plural(groups: int) -> str:
    return "all" if groups == 1 else f"each of {groups} groups"


def _totals(report: Report) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    cached = "not reported"
    if report.cached_tokens is not None:
        cached = f"{report.cached_tokens} ({report.cached_tokens / max(1, report.prompt_tokens):.1%})"
    cpu_us = report.client_cpu_s / max(1, report.output_tokens) * 1e6
    for name, value in (
        ("completed / failed", f"{report.completed} / {report.failed}"),
        ("duration", f"{report.duration_s:.2f} s, at most {report.peak_open_requests} open at once"),
        ("prompt tokens", f"{report.prompt_tokens}, cached: {cached}"),
        ("output tokens", f"{report.output_tokens} in {report.token_events} events"),
        (
            "per second",
            f"{report.output_tokens_per_s:.1f} output tokens, {report.total_tokens_per_s:.1f} total tokens, "
            f"{report.requests_per_s:.2f} requests",
        ),
        ("client's own cpu", f"{report.client_cpu_s:.2f} s, {cpu_us:.0f} us per output token"),
    ):
        table.add_row(name, value)
    return table


def _latencies(report: Report) -> Grid:
    named = (
        ("time to first token", report.ttft_s),
        ("inter-token latency", report.inter_token_s),
        ("time per output token", report.tpot_s),
        ("end to end", report.end_to_end_s),
        ("sent late by", report.send_lag_s),
    )
    rows = (
        text_row(name, *(f"{1e3 * each:.1f}" for each in (found.mean, found.p50, found.p90, found.p99, found.max)))
        for name, found in named
        if found is not None
    )
    return text_grid(("", "mean", "p50", "p90", "p99", "max"), rows)
