"""One real cluster: its steps profiled under one load, then one load after the other."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.clients import state_file
from cluster.clients.admin_access import access_to
from cluster.commands.looking.profile import write
from cluster.profiles.collecting import collect
from tests import process_table
from tests.serving import serving
from tests.trials.bench.policies.trial import target_of
from tests.trials.bench.shared_cores.options import CoresOptions
from tools.bench.client import Client, fixed_concurrency, run_plan
from tools.bench.connect import allow_many_sockets, connect
from tools.bench.load import PlannedRequest, even_plan, poisson_arrivals, warmup_plan
from tools.bench.measure import Report, summarise
from tools.simulate.fit.core_fit import ProfiledStep, steps_of
from tools.simulate.fit.fitting import Log, read_log

WARMUP = 4
FIT_AFTER_S = 2.0
"""The load has begun to fill the workers by then."""
LOG_S = 6.0
"""A request log has a line of each worker every five seconds."""
MOST_REQUESTS = 1000
"""Requests of one load: prompts are numbered through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    rate: float
    due_s: tuple[float, ...]
    report: Report
    """What the client measured."""
    others: float
    """Share of the machine's time that processes of nobody's here took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    log: Log
    """What was written while the steps were profiled."""
    steps: list[list[ProfiledStep]]
    others: float
    """Share of the machine's time that others took meanwhile."""
    loads: tuple[Measured, ...]


async def run_real(said: CoresOptions, serve_flags: Sequence[str], log_path: Path) -> RealRun:
    allow_many_sockets()
    serve = ("--http-port", "0", "--grpc-port", "0", "--request-log", str(log_path), *serve_flags)
    async with serving(serve) as state:
        client = await connect(target_of(state.grpc), said.seed, None)
        try:
            plan = _plan(said, said.fit_rate, round(said.fit_rate * (FIT_AFTER_S + said.fit_s)), 0)
            await fixed_concurrency(client, warmup_plan(plan, WARMUP), 1, lambda record: None)
            profiling = asyncio.create_task(_profiled(state.pid, said.fit_s))
            meter = Meter(state.pid)
            await run_plan(client, plan, None, lambda record: None)
            others = meter.others()
            steps = await profiling
            await asyncio.sleep(LOG_S)
            log = read_log(log_path)
            loads = [
                await _measure(client, state.pid, said, rate, number)
                for number, rate in enumerate(said.all_rates, start=1)
            ]
        finally:
            await client.close()
    return RealRun(log=log, steps=steps, others=others, loads=tuple(loads))


async def _profiled(pid: int, seconds: float) -> list[list[ProfiledStep]]:
    (state,) = (each for each in state_file.running() if each.pid == pid)
    await asyncio.sleep(FIT_AFTER_S)
    profiles = await asyncio.to_thread(collect, access_to(state), seconds)
    with io.StringIO() as file:
        write(profiles, file)
        return steps_of(json.loads(file.getvalue())["traceEvents"])


async def _measure(client: Client, pid: int, said: CoresOptions, rate: float, load: int) -> Measured:
    plan = _plan(said, rate, said.requests, load)
    meter = Meter(pid)
    measured = await run_plan(client, plan, None, lambda record: None)
    return Measured(
        rate=rate,
        due_s=tuple(each.due_s or 0.0 for each in plan),
        report=summarise(measured.records, measured.client_cpu_s),
        others=meter.others(),
    )


def _plan(said: CoresOptions, rate: float, count: int, load: int) -> list[PlannedRequest]:
    """Returns requests of one load, numbered from 0 on, whose prompts no other load has."""
    due_s = poisson_arrivals(rate, count, said.seed + load)
    return even_plan(due_s, (said.prompt_tokens, said.output_tokens), first=load * MOST_REQUESTS)


class Meter:
    """Tells how much of the machine's time was taken by processes that are not ours, since it was made."""

    def __init__(self, pid: int) -> None:
        """`pid` is that of `serve`."""
        self._pid = pid
        self._begun_s, self._not_ours_s = time.perf_counter(), _machine_s() - _own_s(pid)

    def others(self) -> float:
        """Returns their share of all cores."""
        seconds = (time.perf_counter() - self._begun_s) * (psutil.cpu_count() or 1)
        return max(0.0, (_machine_s() - _own_s(self._pid) - self._not_ours_s) / seconds)


def _own_s(pid: int) -> float:
    """Returns the processor seconds of the cluster's processes and of this one."""
    times = [each.cpu_times() for each in (psutil.Process(), *process_table.with_all_below(pid))]
    return float(sum(each.user + each.system for each in times))


def _machine_s() -> float:
    """Returns the busy seconds of all cores since the machine began."""
    times = psutil.cpu_times()
    idle_s: float = times.idle + times.iowait + times.guest + times.guest_nice
    return float(sum(times)) - idle_s
