"""One policy on one fresh cluster under one trace."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.clients.admin_access import AdminAccess, access_to
from tests.serving import serving
from tests.trials.bench.policies.options import Served
from tests.trials.bench.policies.readings import Busy, Reading, between, read
from tools.bench.client import Client, PlanResult, fixed_concurrency, run_plan
from tools.bench.connect import connect
from tools.bench.load import PlannedRequest, Segment, Stream, trace_plan
from tools.bench.measure import Report, summarise
from tools.bench.options import DEFAULT_URL, Target
from tools.simulate.fit.fitting import Log, read_log
from tools.simulate.traces.trace import Trace

REQUEST_S = 600.0
WARMUP_BLOCKS = 4
"""Blocks of a prompt that warms up: some to compute, some to carry."""
WARMUP_TOKENS = 4
"""Tokens of the answer to a prompt that warms up."""
REFUSAL = "grpc RESOURCE_EXHAUSTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    round: int
    """From 0 on."""
    utilisation: float
    """Asked for, of round-robin."""
    policy: str
    report: Report
    """What the client measured."""
    busy: Busy
    """From the first to the last arrival."""
    log: Log
    """Records of the trial's requests and of the workers at its end."""

    @property
    def refused(self) -> int:
        return sum(error.count for error in self.report.errors if error.kind == REFUSAL)

    @property
    def failed(self) -> int:
        return self.report.failed - self.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What is done in every trial."""

    served: Served
    warmup: int
    seed: int


async def run_trial(course: Course, policy: str, trace: Trace, log_path: Path) -> tuple[Report, Busy, Log]:
    async with serving(course.served.arguments(policy, log_path)) as state:
        router = access_to(state)
        client = await connect(target_of(state.grpc), course.seed, None)
        try:
            warmup = _warmup(course.warmup, trace.block_tokens)
            await fixed_concurrency(client, warmup, course.served.decode, lambda record: None)
            begun_s, begun = time.time(), await read(router)
            measured, ended = await _drive(client, router, trace)
        finally:
            await client.close()
    log = read_log(log_path)
    answers = tuple(answer for answer in log.answers if answer.arrival_s >= begun_s)
    report = summarise(measured.records, measured.client_cpu_s)
    return report, between(begun, ended), dataclasses.replace(log, answers=answers)


async def probe(course: Course, policy: str, log_path: Path) -> Log:
    """A cluster that nobody asks anything: what its workers say of themselves."""
    async with serving(course.served.arguments(policy, log_path)):
        pass
    return read_log(log_path)


async def _drive(client: Client, router: AdminAccess, trace: Trace) -> tuple[PlanResult, Reading]:
    due_s = [row.timestamp_s for row in trace.rows]

    async def read_at_last_arrival() -> Reading:
        await asyncio.sleep(due_s[-1])
        return await read(router)

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read_at_last_arrival())
        measuring = tasks.create_task(run_plan(client, trace_plan(trace, due_s), None, lambda record: None))
    return measuring.result(), reading.result()


def _warmup(count: int, block_tokens: int) -> Sequence[PlannedRequest]:
    """Tokens that no trace has: connections are made, nothing is found later."""
    segments = (Segment(Stream.WARMUP, index, WARMUP_BLOCKS * block_tokens + 1) for index in range(count))
    return [PlannedRequest(index, (segment,), WARMUP_TOKENS, None) for index, segment in enumerate(segments)]


def target_of(router: str) -> Target:
    return Target(
        url=DEFAULT_URL,
        grpc=router,
        model=None,
        chat=False,
        text=False,
        stream=True,
        ignore_eos=True,
        temperature=0.0,
        timeout_s=REQUEST_S,
        api_key=None,
    )
