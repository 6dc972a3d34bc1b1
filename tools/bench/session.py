"""One run from flags to report: plan, connect, warm up, load, measure, print."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cluster.flags.checks import STDOUT
from tools.bench.client import Clock, OnRecord, fixed_concurrency, run_plan
from tools.bench.connect import allow_many_sockets, connect
from tools.bench.load import PlannedRequest, arrivals_of, synthetic_plan, trace_plan, warmup_plan
from tools.bench.measure import Record, Report, summarise
from tools.bench.options import BenchOptions
from tools.bench.report import advice, as_json, describe, print_report
from tools.output import write_json
from tools.simulate.traces.trace import Replay, read_trace, replayed


def run_session(options: BenchOptions) -> int:
    """Returns the exit code: 1 if every request failed."""
    plan = plan_of(options)
    report = asyncio.run(measure(options, plan))
    console = Console(stderr=options.pace.json_path == STDOUT)
    print_report(report, describe(options), console)
    if hint := advice(report, options):
        console.print(f"hint: {hint}")
    write_json(as_json(report, options), options.pace.json_path)
    return 0 if report.completed else 1


def plan_of(options: BenchOptions) -> list[PlannedRequest]:
    pace, source, seed = options.pace, options.replay, options.prompts.seed
    if source.trace is None:
        return synthetic_plan(options.prompts, arrivals_of(pace.arrivals, pace.rate, pace.num_requests, seed))
    replay = Replay(
        jitter_s=source.trace_jitter_s, time_scale=source.trace_scale, length_scale=source.trace_length_scale, seed=seed
    )
    trace = replayed(read_trace(Path(source.trace), source.trace_limit), replay)
    if pace.rate is None and pace.concurrency is None:
        return trace_plan(trace, [row.timestamp_s for row in trace.rows])
    return trace_plan(trace, arrivals_of(pace.arrivals, pace.rate, len(trace.rows), seed))


async def measure(options: BenchOptions, plan: Sequence[PlannedRequest]) -> Report:
    allow_many_sockets()
    client = await connect(options.target, options.prompts.seed, options.prompts.vocab_size)
    try:
        concurrency = options.pace.concurrency or 1
        await fixed_concurrency(client, warmup_plan(plan, options.pace.warmup), concurrency, lambda record: None)
        with progress(len(plan), time.perf_counter) as on_record:
            measured = await run_plan(client, plan, options.pace.concurrency, on_record)
    finally:
        await client.close()
    return summarise(measured.records, measured.client_cpu_s)


LINE_EVERY_S = 5.0
"""Seconds between two progress lines where stderr is no terminal."""


class ProgressCounts:
    """Running counts over all records so far."""

    def __init__(self) -> None:
        self.ended = 0
        self.failed = 0
        self.output_tokens = 0

    def add(self, record: Record) -> None:
        self.ended += 1
        if record.answer.failure is not None:
            self.failed += 1
        else:
            self.output_tokens += record.answer.output_tokens

    def __str__(self) -> str:
        return f"{self.output_tokens} tokens, {self.failed} failed"


@contextlib.contextmanager
def progress(total: int, clock: Clock, stream: TextIO = sys.stderr) -> Iterator[OnRecord]:
    if stream.isatty():
        with _bar(total, Console(file=stream)) as on_record:
            yield on_record
    else:
        yield _lines(total, clock, stream)


@contextlib.contextmanager
def _bar(total: int, console: Console) -> Iterator[OnRecord]:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, refresh_per_second=4, transient=True
    ) as bar:
        tally = ProgressCounts()
        task = bar.add_task(str(tally), total=total)

        def on_record(record: Record) -> None:
            tally.add(record)
            bar.update(task, completed=tally.ended, description=str(tally))

        yield on_record


def _lines(total: int, clock: Clock, stream: TextIO) -> OnRecord:
    tally = ProgressCounts()
    next_line_s = clock() + LINE_EVERY_S

    def on_record(record: Record) -> None:
        nonlocal next_line_s
        tally.add(record)
        if clock() >= next_line_s:
            next_line_s = clock() + LINE_EVERY_S
            print(f"bench: {tally.ended}/{total} requests, {tally}", file=stream, flush=True)

    return on_record
