"""Tries one rate at one server until the verdict is certain."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.bench.client import Client, run_plan
from tools.bench.connect import connect, wait_until_ready
from tools.bench.endpoints import Endpoint
from tools.bench.goodput.options import GoodputOptions, Slo
from tools.bench.load import PlannedRequest, Stream, constant_arrivals, even_plan
from tools.bench.measure import Answer, Record

QUIET_S = 60.0
"""Seconds for a server to answer again after it was overloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateTrial:
    rate: float
    passed: bool
    requests: int
    ended: int
    """Requests that had ended when the verdict was certain."""
    met: int
    missed_ttft: int
    missed_inter_token: int
    failed: int


def arrivals_at(rate: float, count: int, kind: str, seed: int) -> list[float]:
    """Returns `count` arrivals within count/rate seconds. A Poisson process with a given number of arrivals spreads
    them uniformly. So the rate is exactly the one asked for, however few they are.
    """
    if kind == "constant":
        return constant_arrivals(rate, count)
    places = np.sort(np.random.default_rng((seed, Stream.ARRIVALS)).uniform(0, count / rate, count))
    arrivals: list[float] = places.tolist()
    return arrivals


async def try_rate(options: GoodputOptions, endpoint: Endpoint, rate: float, number: int, vote: int) -> RateTrial:
    """Tries one rate. `number` makes this trial's prompts differ from all others', `vote` draws the arrivals."""
    endpoints = options.endpoints
    count = options.search.requests_at(rate)
    arrivals = arrivals_at(rate, count, options.requests.arrivals, endpoints.seed + vote)
    plan = even_plan(arrivals, (options.requests.prompt_tokens, options.requests.output_tokens))
    verdict = SloVerdict(options.promise, count)
    seed = endpoints.prompt_seed(endpoint, number)
    client = await connect(endpoint.target, seed, endpoints.vocab_size)
    try:
        ended = await _run_until_certain(client, plan, verdict)
    finally:
        await client.close()
    if ended < count:
        # What was cut off must not burden the next trial.
        await wait_until_ready(endpoint.target, seed, endpoints.vocab_size, QUIET_S)
    return RateTrial(
        rate=rate,
        passed=bool(verdict.passed),
        requests=count,
        ended=ended,
        met=verdict.met,
        missed_ttft=verdict.missed_ttft,
        missed_inter_token=verdict.missed_inter_token,
        failed=verdict.failed,
    )


async def _run_until_certain(client: Client, plan: Sequence[PlannedRequest], verdict: SloVerdict) -> int:
    """Returns how many requests have ended."""
    certain = asyncio.Event()
    ended = 0

    def on_record(record: Record) -> None:
        nonlocal ended
        if not certain.is_set():
            ended += 1
            verdict.add(record.answer)
            if verdict.passed is not None:
                certain.set()

    running = asyncio.create_task(run_plan(client, plan, None, on_record))
    waiting = asyncio.create_task(certain.wait())
    try:
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (running, waiting):
            task.cancel()
        results = await asyncio.gather(running, waiting, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return ended


class SloVerdict:
    """Counts the requests that end, until those that are left cannot change the verdict."""

    def __init__(self, promise: Slo, requests: int) -> None:
        self._promise = promise
        self._requests = requests
        self._needed = math.ceil(promise.share * requests - 1e-9)
        self.met = 0
        self.missed_ttft = 0
        self.missed_inter_token = 0
        self.failed = 0

    def add(self, answer: Answer) -> None:
        """Counts an answer. A request that misses both promises counts as one that missed its first token."""
        if answer.failure is not None or not answer.event_times_s:
            self.failed += 1
        elif answer.event_times_s[0] - answer.sent_at_s > self._promise.ttft_s:
            self.missed_ttft += 1
        elif own_inter_token_p99_s(answer) > self._promise.inter_token_s:
            self.missed_inter_token += 1
        else:
            self.met += 1

    @property
    def passed(self) -> bool | None:
        """Whether the run has passed. None while both verdicts are possible."""
        missed = self.failed + self.missed_ttft + self.missed_inter_token
        if self.met >= self._needed:
            return True
        return False if missed > self._requests - self._needed else None


def own_inter_token_p99_s(answer: Answer) -> float:
    """Returns the p99 of the answer's own gaps between tokens. It is 0 for a single event."""
    gaps = np.diff(answer.event_times_s)
    return float(np.percentile(gaps, 99)) if gaps.size else 0.0
