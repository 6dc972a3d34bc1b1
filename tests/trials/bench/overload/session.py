"""Capacity first, then the loads in turns; a table, a verdict, JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.flags.checks import STDOUT
from tests.trials.bench.overload.memory import own_bytes
from tests.trials.bench.overload.options import OverloadOptions
from tests.trials.bench.overload.verdict import End, Run, end_of, goodputs, misses, run_of
from tools.bench.client import run_plan
from tools.bench.connect import allow_many_sockets, connect, wait_until_ready
from tools.bench.goodput.trial import arrivals_at
from tools.bench.load import PlannedRequest, Segment, Stream
from tools.bench.measure import Answer
from tools.output import write_json
from twostroke.base.errors import ConfigError

SCHEMA_VERSION = 1
"""Version of the JSON; it is raised when a key changes its meaning."""
EXPLANATION = (
    "good/s: whole answers in time. kept: of what was not refused, met. TTFT: median, of met. refusal: median and p99 "
    "seconds until a refusal; ratio: that median over TTFT's. MiB: of all processes together, page pools not counted."
)
WARM_SHARE = 0.25
"""Share of the run that measures the capacity, in which workers learn their costs, connections are made."""
QUIET_S = 60.0
"""For a server to answer again after a run."""


def run_session(options: OverloadOptions) -> int:
    capacity_per_s, runs = asyncio.run(measure(options))
    found = misses(runs)
    console = Console(stderr=options.load.json_path == STDOUT)
    console.print(_table(options, capacity_per_s, runs))
    console.print(f"[dim]{EXPLANATION}[/dim]", highlight=False)
    for miss in found:
        console.print(f"miss: {miss}", markup=False)
    write_json(_as_json(options, capacity_per_s, runs, found), options.load.json_path)
    return 1 if found else 0


async def measure(options: OverloadOptions) -> tuple[float, list[Run]]:
    """The capacity in requests per second, and all runs."""
    allow_many_sockets()
    endpoints = options.endpoints
    target = endpoints.all[0].target
    await wait_until_ready(target, endpoints.seed, endpoints.vocab_size, endpoints.wait_s)
    capacity_per_s = options.load.capacity_per_s or await _capacity(options)
    print(f"bench: capacity {capacity_per_s:.3g} requests/s", file=sys.stderr, flush=True)
    runs: list[Run] = []
    for number in range(options.load.rounds):
        for load in options.load.multiples:
            runs.append(await _run(options, load, capacity_per_s, 1 + len(runs)))
            _say(number, runs[-1])
            await wait_until_ready(target, endpoints.seed, endpoints.vocab_size, QUIET_S)
    return capacity_per_s, runs


async def _capacity(options: OverloadOptions) -> float:
    """Answers per second with enough requests open, none of which has a deadline to miss."""
    target = dataclasses.replace(options.endpoints.all[0].target, timeout_s=QUIET_S)
    client = await connect(target, options.endpoints.prompt_seed(options.endpoints.all[0], 0), None)
    ended_s: list[float] = []

    async def lane(number: int, until_s: float) -> None:
        index = number
        while time.perf_counter() < until_s:
            answer = await client.prepare(_request(options, index, None))()
            index += options.load.concurrency
            if end_of(answer) is End.MET:
                ended_s.append(answer.ended_at_s)
            else:
                await asyncio.sleep(options.deadline_s / 10)  # refused: this many need not be open

    begun_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as lanes:
            for number in range(options.load.concurrency):
                lanes.create_task(lane(number, begun_s + options.load.duration_s))
    finally:
        await client.close()
    warm_s, last_s = begun_s + WARM_SHARE * options.load.duration_s, begun_s + options.load.duration_s
    counted = sum(warm_s <= at_s < last_s for at_s in ended_s)
    if not counted:
        raise ConfigError("the server answered nothing while its capacity was measured", field="urls")
    return counted / (last_s - warm_s)


async def _run(options: OverloadOptions, load: float, capacity_per_s: float, number: int) -> Run:
    endpoint, rate_per_s = options.endpoints.all[0], load * capacity_per_s
    count = math.ceil(rate_per_s * options.load.duration_s)
    arrivals = arrivals_at(rate_per_s, count, "poisson", options.endpoints.seed + number)
    plan = [_request(options, index, arrivals[index]) for index in range(count)]
    client = await connect(endpoint.target, options.endpoints.prompt_seed(endpoint, number), None)
    answers: list[Answer] = []
    begun_s = time.perf_counter()
    try:
        await run_plan(client, plan, None, lambda record: answers.append(record.answer))
    finally:
        await client.close()
    return run_of(
        answers,
        load=load,
        rate_per_s=rate_per_s,
        begun_s=begun_s,
        window_s=(options.deadline_s, options.load.duration_s),
        own_bytes=own_bytes(endpoint.target),
    )


def _request(options: OverloadOptions, index: int, due_s: float | None) -> PlannedRequest:
    return PlannedRequest(
        index, (Segment(Stream.OWN, index, options.load.prompt_tokens),), options.load.output_tokens, due_s
    )


def _say(number: int, run: Run) -> None:
    ends = ", ".join(f"{count} {end}" for end, count in sorted(run.ends.items()))
    print(
        f"bench: round {number + 1}, {run.load:g}x: {run.goodput_per_s:.2f} requests/s of use ({ends})",
        file=sys.stderr,
        flush=True,
    )


def _table(options: OverloadOptions, capacity_per_s: float, runs: list[Run]) -> Table:
    title = (
        f"{options.load.prompt_tokens} -> {options.load.output_tokens} tokens, deadline {options.deadline_s:g} s, "
        f"capacity {capacity_per_s:.2f} requests/s; seed {options.endpoints.seed}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("load", "good/s", *End, "kept", "TTFT", "refusal", "p99", "ratio", "MiB"):
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            f"{run.load:g}x",
            f"{run.goodput_per_s:.2f}",
            *(str(run.ends.get(end, 0)) for end in End),
            "" if run.admitted_share is None else f"{run.admitted_share:.1%}",
            "" if run.ttft_s is None else f"{run.ttft_s.p50:.3f}",
            *(("", "") if run.refusal_s is None else (f"{run.refusal_s.p50:.3f}", f"{run.refusal_s.p99:.3f}")),
            "" if run.refusal_over_ttft is None else f"{run.refusal_over_ttft:.3f}",
            str(sum(run.own_bytes.values()) >> 20) if run.own_bytes else "?",
        )
    return table


def _as_json(options: OverloadOptions, capacity_per_s: float, runs: list[Run], found: list[str]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "prompt_tokens": options.load.prompt_tokens,
        "output_tokens": options.load.output_tokens,
        "deadline_s": options.deadline_s,
        "duration_s": options.load.duration_s,
        "seed": options.endpoints.seed,
        "capacity_per_s": capacity_per_s,
        "goodput_per_s": {f"{load:g}": goodput for load, goodput in goodputs(runs).items()},
        "runs": [dataclasses.asdict(run) | {"admitted_share": run.admitted_share} for run in runs],
        "misses": found,
    }
