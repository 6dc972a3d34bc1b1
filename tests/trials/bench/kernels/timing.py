"""How long something takes, and how long it must take at least: on this machine, with these limits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.kernels.limits import Limits


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be read, and to be computed."""

    bytes: float
    operations: float

    def least_s(self, limits: Limits) -> float:
        return max(self.bytes / limits.read_bytes_per_s, self.operations / limits.operations_per_s)


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one call."""

    median_s: float
    least_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class Result:
    part: str
    what: str
    kernels: str
    threads: int
    work: Work
    timed: Timed

    def share(self, limits: Limits) -> float:
        """Share of the limit that is reached: 1 is the best there can be, unless what is read fits the cache."""
        return self.work.least_s(limits) / self.timed.median_s


def timed(call: Callable[[], object], repeats: int, per_call: int = 1) -> Timed:
    """One call first that does not count. `per_call`: how many of what is timed one call does."""
    call()
    samples = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        call()
        samples.append((time.perf_counter() - started_s) / per_call)
    return Timed(statistics.median(samples), min(samples), max(samples))


def timed_by_turns(calls: Sequence[Callable[[], object]], repeats: int) -> list[Timed]:
    """The same for several calls that take turns: what disturbs one disturbs all."""
    samples: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, own in zip(calls, samples, strict=True):
            started_s = time.perf_counter()
            call()
            if turn:
                own.append(time.perf_counter() - started_s)
    return [Timed(statistics.median(own), min(own), max(own)) for own in samples]
