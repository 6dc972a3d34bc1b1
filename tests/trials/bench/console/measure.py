"""Rounds with open pages and rounds without, in turns, under the same requests."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from cluster.flags.checks import STDOUT
from tests.trials.bench.console.clients import Pages, Requests
from tests.trials.bench.console.options import ConsoleOptions
from tests.trials.bench.console.serving import Served, serving
from tools.bench.connect import allow_many_sockets
from tools.output import write_json
from twostroke.base.errors import PeerLost

WARM_UP_ANSWERS = 3
"""Answers for each worker before the first round: a router opens its link to a worker as it first uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    answers: int
    cpu_ms: float
    """Processor time of the router for each answer, with all that it does beside."""
    answer_p50_ms: float
    answer_p99_ms: float
    page_calls: int
    page_bytes: int
    """Bytes of the largest answer to a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    without: tuple[Round, ...]
    with_pages: tuple[Round, ...]
    """Each began when the round without pages of the same place had ended, or just before it."""

    @property
    def cpu_ratio(self) -> float:
        """Processor time of the router per answer with pages over that without: the median over the turns."""
        return _ratio([(one.cpu_ms, other.cpu_ms) for one, other in self._turns])

    @property
    def p50_ratio(self) -> float:
        return _ratio([(one.answer_p50_ms, other.answer_p50_ms) for one, other in self._turns])

    @property
    def p99_ratio(self) -> float:
        return _ratio([(one.answer_p99_ms, other.answer_p99_ms) for one, other in self._turns])

    @property
    def _turns(self) -> list[tuple[Round, Round]]:
        return list(zip(self.with_pages, self.without, strict=True))


def run_session(options: ConsoleOptions) -> int:
    allow_many_sockets()
    measured = asyncio.run(measure(options))
    console = Console(stderr=options.json_path == STDOUT)
    console.print(_table(options, measured))
    console.print(
        f"with {options.pages} open pages over without: processor time of the router {measured.cpu_ratio:.4f}x, "
        f"answers p50 {measured.p50_ratio:.3f}x, p99 {measured.p99_ratio:.3f}x"
    )
    ratios = {"cpu": measured.cpu_ratio, "p50": measured.p50_ratio, "p99": measured.p99_ratio}
    write_json(
        {"schema_version": 1, "options": options.model_dump(), "ratios": ratios, "rounds": asdict(measured)},
        options.json_path,
    )
    return 0


async def measure(options: ConsoleOptions) -> Measured:
    """Raises PeerLost where a request or a page fails."""
    async with serving(options.workers) as served:
        requests = Requests(served)
        load = asyncio.create_task(requests.run(options.rate))
        try:
            while len(requests.answered_s) < WARM_UP_ANSWERS * options.workers and not load.done():
                await asyncio.sleep(0.1)
            without, with_pages = list[Round](), list[Round]()
            for turn in range(options.rounds):
                for has_pages in (False, True) if turn % 2 else (True, False):
                    taken = await _round(options, served, requests, has_pages=has_pages)
                    (with_pages if has_pages else without).append(taken)
                    if load.done():
                        load.result()
        finally:
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
    return Measured(without=tuple(without), with_pages=tuple(with_pages))


async def _round(options: ConsoleOptions, served: Served, requests: Requests, *, has_pages: bool) -> Round:
    pages, router = Pages(served, options.pages), served.router_pid
    async with pages if has_pages else contextlib.nullcontext():
        requests.take()
        before_s = _spent_s(router)
        await asyncio.sleep(options.seconds)
        spent_s, answered_s = _spent_s(router) - before_s, requests.take()
    if len(answered_s) < 2:
        raise PeerLost(f"the router answered {len(answered_s)} requests in {options.seconds:g} s")
    return Round(
        answers=len(answered_s),
        cpu_ms=1e3 * spent_s / len(answered_s),
        answer_p50_ms=1e3 * statistics.median(answered_s),
        answer_p99_ms=1e3 * statistics.quantiles(answered_s, n=100)[98],
        page_calls=pages.calls,
        page_bytes=pages.most_bytes,
    )


def _spent_s(pid: int) -> float:
    """Returns the processor seconds of a process, also of its threads that have ended, to the nanosecond.

    The number of the clock is what `clock_getcpuclockid` gives on Linux: the process is inverted, and 2 is the
    scheduler's time.
    """
    return time.clock_gettime(~pid << 3 | 2)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(one / other for one, other in pairs)


def _table(options: ConsoleOptions, measured: Measured) -> Table:
    table = Table(title=f"a router with {options.workers} workers and {options.rate:g} requests a minute")
    for column in ("pages", "answers/s", "router ms per answer", "p50 ms", "p99 ms", "page calls/s", "largest KB"):
        table.add_column(column, justify="right")
    for pages, rounds in ((0, measured.without), (options.pages, measured.with_pages)):
        table.add_row(
            str(pages),
            f"{sum(each.answers for each in rounds) / (len(rounds) * options.seconds):.0f}",
            f"{statistics.median(each.cpu_ms for each in rounds):.3f}",
            f"{statistics.median(each.answer_p50_ms for each in rounds):.2f}",
            f"{statistics.median(each.answer_p99_ms for each in rounds):.1f}",
            f"{sum(each.page_calls for each in rounds) / (len(rounds) * options.seconds):.1f}",
            f"{max(each.page_bytes for each in rounds) / 1e3:.0f}",
        )
    return table
