"""What servers are compared by. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tools.bench.compare.rounds import Run
from tools.bench.measure import Distribution, Report
from tools.bench.ratios import LoadOutcome, Metric, Sample, outcomes_of


def _of(found: Distribution | None, read: Callable[[Distribution], float]) -> float | None:
    return None if found is None else read(found)


METRICS: tuple[Metric[Report], ...] = (
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


def compared(runs: Sequence[Run], names: Sequence[str], baseline: str) -> list[LoadOutcome]:
    """Return the outcome of each load, with every endpoint in the order of the names."""
    samples = [Sample(run.round, run.load.name, run.endpoint, run.report) for run in runs]
    return outcomes_of(samples, names, baseline, METRICS)


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
