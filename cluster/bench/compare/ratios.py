"""Runs to numbers: what each endpoint reached, and that over the baseline's, round by round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.bench.compare.rounds import Run
from cluster.bench.measure import Distribution, Report


@dataclass(frozen=True, slots=True)
class Metric:
    key: str
    label: str
    unit: str
    scale: float
    """From the report's seconds to the unit that is shown."""
    more_is_better: bool
    adds_up: bool
    """Over rounds, where others have a median."""
    read: Callable[[Report], float | None]


def _of(found: Distribution | None, read: Callable[[Distribution], float]) -> float | None:
    return None if found is None else read(found)


METRICS = (
    Metric("ttft_p50_s", "TTFT p50", "ms", 1e3, False, False, lambda report: _of(report.ttft_s, lambda d: d.p50)),
    Metric("ttft_p90_s", "TTFT p90", "ms", 1e3, False, False, lambda report: _of(report.ttft_s, lambda d: d.p90)),
    Metric("ttft_p99_s", "TTFT p99", "ms", 1e3, False, False, lambda report: _of(report.ttft_s, lambda d: d.p99)),
    Metric("tpot_mean_s", "TPOT mean", "ms", 1e3, False, False, lambda report: _of(report.tpot_s, lambda d: d.mean)),
    Metric("itl_p50_s", "ITL p50", "ms", 1e3, False, False, lambda report: _of(report.inter_token_s, lambda d: d.p50)),
    Metric("itl_p99_s", "ITL p99", "ms", 1e3, False, False, lambda report: _of(report.inter_token_s, lambda d: d.p99)),
    Metric("itl_max_s", "ITL max", "ms", 1e3, False, False, lambda report: _of(report.inter_token_s, lambda d: d.max)),
    Metric("output_tokens_per_s", "output", "tok/s", 1, True, False, lambda report: report.output_tokens_per_s),
    Metric("failed", "errors", "", 1, False, True, lambda report: float(report.failed)),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """One number per round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def total(self) -> float:
        return sum(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One endpoint under one load. A metric that no round has is absent."""

    endpoint: str
    values: dict[str, Spread]
    ratios: dict[str, Spread]
    """Over the baseline in the same round; empty for the baseline itself."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    load: str
    outcomes: tuple[Outcome, ...]
    """In the endpoints' order."""


def outcomes_of(runs: Sequence[Run], names: Sequence[str], baseline: str) -> list[LoadOutcome]:
    loads = dict.fromkeys(run.load.name for run in runs)
    return [
        LoadOutcome(
            load, tuple(_outcome([run for run in runs if run.load.name == load], name, baseline) for name in names)
        )
        for load in loads
    ]


def notes_of(runs: Sequence[Run]) -> list[str]:
    """What the runs themselves had to say, and their failures, each once per endpoint and load."""
    said = [(f"{run.endpoint}: {note}", run.load.name) for run in runs for note in run.report.notes]
    said += [
        (f"{run.endpoint}: {error.kind} ({error.example})", run.load.name)
        for run in runs
        for error in run.report.errors
    ]
    loads_of: dict[str, list[str]] = {}
    for note, load in dict.fromkeys(said):
        loads_of.setdefault(note, []).append(load)
    return [f"{note} [{', '.join(loads)}]" for note, loads in loads_of.items()]


def _outcome(runs: Sequence[Run], name: str, baseline: str) -> Outcome:
    own = {run.round: run.report for run in runs if run.endpoint == name}
    base = {run.round: run.report for run in runs if run.endpoint == baseline}
    values, ratios = {}, {}
    for metric in METRICS:
        if spread := _spread(metric.read(report) for report in own.values()):
            values[metric.key] = spread
        pairs = [(metric.read(own[number]), metric.read(base[number])) for number in own if number in base]
        if name != baseline and (spread := _spread(_ratio(*pair) for pair in pairs)):
            ratios[metric.key] = spread
    return Outcome(name, values, ratios)


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = tuple(value for value in values if value is not None)
    return Spread(known) if known else None
