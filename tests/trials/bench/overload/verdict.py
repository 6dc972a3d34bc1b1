"""Answers of one run to what they were worth; runs to a verdict. Pure."""

from __future__ import annotations

import enum
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tools.bench.measure import Answer, Distribution, distribution

GOODPUT_SHARE = 0.9
"""Least share of the peak over all loads: less than that, and load has cost the server what it can do."""
MOST_GROWTH = 1.15
"""Most growth of a process's own memory, from its first run on: allocators keep what they once had."""
SMALL_GROWTH_BYTES = 24 << 20
"""No process is said to grow for less: caches of short strings, histograms and pools of threads fill up."""

_REFUSED = frozenset({"http 429", "grpc RESOURCE_EXHAUSTED"})
_LATE = frozenset({"timeout", "http 504", "stream timeout_error", "grpc DEADLINE_EXCEEDED"})


class End(enum.StrEnum):
    MET = "met"
    """Whole, and in time."""
    LATE = "late"
    """Its deadline has passed, and it was told so."""
    REFUSED = "refused"
    """Nothing of it was begun."""
    FAILED = "failed"


def end_of(answer: Answer) -> End:
    if answer.failure is None:
        return End.MET
    if answer.failure.kind in _LATE:
        return End.LATE
    return End.REFUSED if answer.failure.kind in _REFUSED else End.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load, for one duration."""

    load: float
    rate_per_s: float
    ends: Mapping[str, int]
    goodput_per_s: float
    """Rate of whole answers in time, while as many came as went."""
    ttft_s: Distribution | None
    refusal_s: Distribution | None
    failures: Mapping[str, int]
    own_bytes: Mapping[str, int]
    """Memory of every process of the server, at the end; empty where it is on another machine."""

    @property
    def admitted_share(self) -> float | None:
        """Share of requests that were not refused and met their deadline."""
        met, others = self.ends.get(End.MET, 0), self.ends.get(End.LATE, 0) + self.ends.get(End.FAILED, 0)
        return met / (met + others) if met + others else None

    @property
    def refusal_over_ttft(self) -> float | None:
        if self.refusal_s is None or self.ttft_s is None:
            return None
        return self.refusal_s.p50 / self.ttft_s.p50


def run_of(
    answers: Sequence[Answer],
    *,
    load: float,
    rate_per_s: float,
    begun_s: float,
    window_s: tuple[float, float],
    own_bytes: Mapping[str, int],
) -> Run:
    """`window_s` counts from the beginning: answers that end within it make the goodput."""
    met = [answer for answer in answers if end_of(answer) is End.MET]
    first_s, last_s = window_s
    in_window = sum(first_s <= answer.ended_at_s - begun_s < last_s for answer in met)
    refused = [answer for answer in answers if end_of(answer) is End.REFUSED]
    failed = [answer.failure for answer in answers if end_of(answer) is End.FAILED]
    return Run(
        load=load,
        rate_per_s=rate_per_s,
        ends={end.value: count for end, count in Counter(map(end_of, answers)).items()},
        goodput_per_s=in_window / (last_s - first_s),
        ttft_s=distribution(a.event_times_s[0] - a.sent_at_s for a in met if a.event_times_s),
        refusal_s=distribution(answer.ended_at_s - answer.sent_at_s for answer in refused),
        failures=Counter(f"{failure.kind}: {failure.message}" for failure in failed if failure is not None),
        own_bytes=own_bytes,
    )


def goodputs(runs: Iterable[Run]) -> dict[float, float]:
    """Returns the median goodput of each load's runs."""
    by_load: dict[float, list[float]] = {}
    for run in runs:
        by_load.setdefault(run.load, []).append(run.goodput_per_s)
    return {load: statistics.median(found) for load, found in sorted(by_load.items())}


def misses(runs: Sequence[Run]) -> list[str]:
    """What an overloaded server should not have done; empty if it did well."""
    found = [f"failed at {run.load:g}x: {count} {what}" for run in runs for what, count in run.failures.items()]
    by_load = goodputs(runs)
    peak = max(by_load.values())
    found += [
        f"goodput at {load:g}x is {goodput / peak:.0%} of its peak"
        for load, goodput in by_load.items()
        if load > 1 and goodput < GOODPUT_SHARE * peak
    ]
    first, last = runs[0].own_bytes, runs[-1].own_bytes
    found += [
        f"{process} grew from {first[process] >> 20} to {own_bytes >> 20} MiB"
        for process, own_bytes in last.items()
        if process in first
        and own_bytes > MOST_GROWTH * first[process]
        and own_bytes - first[process] > SMALL_GROWTH_BYTES
    ]
    found += [f"{process} is gone" for process in first if process not in last]
    return found
