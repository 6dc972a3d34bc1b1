"""Fills an index, draws a fleet's loads, and times decisions in it."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from cluster.flags.checks import STDOUT
from router.admission.queued_request import QueuedRequest
from router.fleet.worker import Shape, Worker
from router.routing.policies import NARROWING, policy_named
from router.routing.reservations import Reservations
from router.routing.selector import Selector, Workers
from tests.trials.bench.decisions.options import DecisionOptions
from tests.trials.bench.index.content import DEEP_BLOCKS, SHALLOW_BLOCKS, Content
from tests.trials.bench.index.subjects import subject_named
from tests.trials.bench.index.subjects.our_index import EPOCH, OurIndex
from tools.output import write_json
from twostroke.base.allocator import rss_bytes
from twostroke.base.ids import BlockHash, RequestId
from twostroke.config import Role
from twostroke.request import Attempt, GenerateRequest, SamplingParams
from twostroke.rpc.v1.control_pb2 import WORKER_STATE_SERVING, LinkRate, Load, StepCosts

BLOCK_TOKENS = 16
IN_FLIGHT = 256
"""Requests placed and without a first token while the next one is."""
WARM_UP = 50
MIB = 1 << 20
SAMPLING = SamplingParams(seed=0, max_tokens=300)
COSTS = StepCosts(
    step_s=0.015, stream_s=1.5e-4, context_token_s=2e-8, prompt_token_s=1e-4, prompt_pair_s=1.3e-9,
    step_tokens=4096, step_target_s=0.04,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Milliseconds of one decision."""

    blocks: int
    """Blocks of the request's prompt."""
    p50_ms: float
    p99_ms: float
    cpu_p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """Bytes by which this process grew."""

    index_bytes: int
    """While the index learned its blocks."""
    state_bytes: int
    """Since, at most: workers' reports, orders of candidates, and reservations of the requests in flight."""


@dataclass(frozen=True, slots=True)
class Measured:
    taken: tuple[Taken, ...]
    """One row for short prompts and one for long ones."""
    grown: Grown


def run_session(options: DecisionOptions) -> int:
    measured = measure(options)
    console = Console(stderr=options.json_path == STDOUT)
    console.print(f"policy {options.policy}, {options.workers} workers, {options.blocks} blocks, {IN_FLIGHT} in flight")
    for row in measured.taken:
        console.print(
            f"prompt of {row.blocks} blocks: p50 {row.p50_ms:.2f} ms, p99 {row.p99_ms:.2f} ms "
            f"(of CPU time {row.cpu_p99_ms:.2f} ms)"
        )
    grown = measured.grown
    console.print(f"memory: index {grown.index_bytes / MIB:.0f} MiB, state {grown.state_bytes / MIB:.0f} MiB")
    rows = [asdict(row) for row in measured.taken]
    told = {"schema_version": 1, "options": options.model_dump(), "decisions": rows, "memory": asdict(grown)}
    write_json(told, options.json_path)
    return 0


def measure(options: DecisionOptions) -> Measured:
    content = Content(workers=options.workers, blocks=options.blocks, seed=options.seed)
    subject = subject_named("twostroke", options.workers)
    assert isinstance(subject, OurIndex)
    begun_bytes = rss_bytes()
    for stored in content.stored():
        subject.learn(stored.worker, subject.message(stored))
    gc.collect()
    learned_bytes = rss_bytes()
    taken = tuple(_taken(options, content, subject, depth) for depth in (SHALLOW_BLOCKS, DEEP_BLOCKS))
    grown = Grown(index_bytes=learned_bytes - begun_bytes, state_bytes=rss_bytes() - learned_bytes)
    return Measured(taken, grown)


def _taken(options: DecisionOptions, content: Content, subject: OurIndex, depth: int) -> Taken:
    draws = random.Random(f"loads {options.seed}")
    reservations = Reservations()
    selector = Selector(
        policy_named(options.policy),
        subject.index,
        reservations,
        seed=options.seed,
        narrows=options.policy in NARROWING,
    )
    decode, prefill = _workers(subject, draws)
    workers = Workers(Shape(block_size=BLOCK_TOKENS, page_bytes=1 << 20), decode, prefill)
    wall_s: list[float] = []
    cpu_s: list[float] = []
    in_flight: deque[RequestId] = deque()
    for number, request in enumerate(_requests(content, depth, WARM_UP + options.decisions)):
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        selector.select(request, workers, number / 1000)
        wall_s.append(time.perf_counter() - started_s)
        cpu_s.append(time.thread_time() - started_cpu_s)
        in_flight.append(request.request_id)
        if len(in_flight) > IN_FLIGHT:
            reservations.end(in_flight.popleft())
    return Taken(
        blocks=depth,
        p50_ms=1e3 * statistics.median(wall_s[WARM_UP:]),
        p99_ms=1e3 * _p99(wall_s[WARM_UP:]),
        cpu_p99_ms=1e3 * _p99(cpu_s[WARM_UP:]),
    )


def _requests(content: Content, depth: int, count: int) -> Iterator[QueuedRequest]:
    for number, question in enumerate(content.questions(depth, count, popular=False)):
        hashes = tuple(BlockHash(name) for name in question.block_hashes)
        request_id = RequestId(f"{depth}-{number}")
        yield QueuedRequest(
            attempt=Attempt(
                request=GenerateRequest(prompt=(0,) * (len(hashes) * BLOCK_TOKENS + 5), sampling=SAMPLING),
                request_id=request_id,
                number=0,
                block_hashes=hashes,
                router_id="router-0",
            ),
            arrived_s=0.0,
        )


def _workers(subject: OurIndex, draws: random.Random) -> tuple[list[Worker], list[Worker]]:
    """Decode workers and prefill workers: every other one, so that both hold of everything."""
    names = subject.workers
    workers = []
    for number, worker in enumerate(names):
        role = Role.DECODE if number % 2 else Role.PREFILL
        known = Worker(worker, role, "", EPOCH, WORKER_STATE_SERVING)
        links = [
            LinkRate(worker_id=peer, latency_s=0.002, bytes_per_s=draws.uniform(1e9, 1e10))
            for peer in names[::2]
            if peer != worker
        ]
        load = Load(
            running=draws.randrange(30),
            queued_s=draws.expovariate(2.0),
            queued_tokens=draws.randrange(20_000),
            pages_free=draws.choice((0, 2000)),
            pages_cached=20_000,
            pages_active=draws.randrange(3000),
            prefill_busy_s=0.0,
            costs=COSTS,
            links=links,
        )
        known.report(load, 0.0)
        workers.append(known)
    return workers[1::2], workers[::2]


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
