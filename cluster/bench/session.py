"""One run from flags to report: plan, connect, warm up, load, measure, print."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cluster.bench.client import Client
from cluster.bench.drive import fixed_concurrency, open_loop
from cluster.bench.load import (
    PlannedRequest,
    Speller,
    arrivals_of,
    synthetic_plan,
    trace_plan,
    trace_times,
    warmup_plan,
)
from cluster.bench.measure import Report, summarise
from cluster.bench.options import DEFAULT_VOCAB_SIZE, STDOUT, Options
from cluster.bench.progress import progress
from cluster.bench.report import advice, as_json, describe, print_report
from cluster.bench.trace import read_trace


def run_session(options: Options) -> int:
    """Exit code: 1 if every request failed."""
    plan = plan_of(options)
    report = asyncio.run(measure(options, plan))
    json_on_stdout = options.json_path == STDOUT
    console = Console(stderr=json_on_stdout)
    print_report(report, describe(options), console)
    if hint := advice(report, options):
        console.print(f"hint: {hint}")
    if options.json_path is not None:
        text = json.dumps(as_json(report, options), indent=2) + "\n"
        if json_on_stdout:
            sys.stdout.write(text)
        else:
            Path(options.json_path).write_text(text, encoding="utf-8")
    return 0 if report.completed else 1


def plan_of(options: Options) -> list[PlannedRequest]:
    work = options.workload
    if work.trace is None:
        return synthetic_plan(work, arrivals_of(options.arrivals, options.rate, work.num_requests, work.seed))
    rows = read_trace(work.trace, work.trace_limit)
    if options.rate is None and options.concurrency is None:
        return trace_plan(rows, work, trace_times(rows, work))
    return trace_plan(rows, work, arrivals_of(options.arrivals, options.rate, len(rows), work.seed))


async def measure(options: Options, plan: Sequence[PlannedRequest]) -> Report:
    _allow_many_sockets()
    client = await _connect(options)
    try:
        lanes = options.concurrency or 1
        await fixed_concurrency(client, warmup_plan(plan, options.warmup), lanes, lambda record: None)
        gc.collect()  # now rather than in the middle of the measurement
        with progress(len(plan), time.perf_counter) as on_record:
            cpu_before_s = time.process_time()
            if options.concurrency is not None:
                records = await fixed_concurrency(client, plan, options.concurrency, on_record)
            else:
                records = await open_loop(client, plan, time.perf_counter, on_record)
            cpu_s = time.process_time() - cpu_before_s
    finally:
        await client.close()
    return summarise(records, cpu_s)


async def _connect(options: Options) -> Client:
    """Only the client that is used gets imported."""
    target, work = options.target, options.workload
    if target.grpc is not None:
        from cluster.bench.grpc_client import GrpcClient, served_vocab_size

        vocab_size = work.vocab_size or await served_vocab_size(target.grpc)
        return GrpcClient(target, Speller(vocab_size, work.seed), time.perf_counter)
    from cluster.bench.http_client import HttpClient

    speller = Speller(work.vocab_size or DEFAULT_VOCAB_SIZE, work.seed)
    return await HttpClient.connect(target, speller, time.perf_counter)


def _allow_many_sockets() -> None:
    """An open loop against a slow server may hold thousands of connections; the usual limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
