"""What policies are compared by. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.trials.bench.policies.trial import Trial
from tools.bench.measure import Distribution
from tools.bench.ratios import LoadOutcome, Metric, Sample, outcomes_of
from tools.simulate.fleet.results import percentile
from twostroke.observability.request_log import AnswerRecord

CPU_SHARE_WORTH_A_NOTE = 0.8
"""Share of all cores; above it, clusters wait for this machine and not for their model."""


def hit_rate(trial: Trial) -> float | None:
    """Share of prompt tokens that were cached, as answers report them."""
    report = trial.report
    return None if report.cached_tokens is None else report.cached_tokens / max(1, report.prompt_tokens)


def prediction_errors(answers: Sequence[AnswerRecord]) -> list[float]:
    """Signed and relative, of the time to first token: above 0 where the router expected too much."""
    return [
        answer.predicted_ttft_s / answer.ttft_s - 1
        for answer in answers
        if answer.predicted_ttft_s is not None and answer.ttft_s
    ]


def _of(found: Distribution | None, read: Callable[[Distribution], float]) -> float | None:
    return None if found is None else read(found)


METRICS: tuple[Metric[Trial], ...] = (
    Metric("completed", "done", "", 1, True, True, lambda trial: float(trial.report.completed)),
    Metric("refused", "refused", "", 1, False, True, lambda trial: float(trial.refused)),
    Metric("failed", "failed", "", 1, False, True, lambda trial: float(trial.failed)),
    Metric("ttft_mean_s", "TTFT mean", "ms", 1e3, False, False, lambda t: _of(t.report.ttft_s, lambda d: d.mean)),
    Metric("ttft_p50_s", "p50", "ms", 1e3, False, False, lambda t: _of(t.report.ttft_s, lambda d: d.p50)),
    Metric("ttft_p90_s", "p90", "ms", 1e3, False, False, lambda t: _of(t.report.ttft_s, lambda d: d.p90)),
    Metric("itl_p50_s", "ITL p50", "ms", 1e3, False, False, lambda t: _of(t.report.inter_token_s, lambda d: d.p50)),
    Metric("itl_p99_s", "p99", "ms", 1e3, False, False, lambda t: _of(t.report.inter_token_s, lambda d: d.p99)),
    Metric("hit_rate", "hits %", "%", 100, True, False, hit_rate),
    Metric("utilisation", "util %", "%", 100, False, False, lambda trial: trial.busy.utilisation),
    Metric(
        "prediction_error",
        "TTFT error %",
        "%",
        100,
        False,
        False,
        lambda trial: percentile([abs(error) for error in prediction_errors(trial.log.answers)], 0.5),
        has_ratio=False,
    ),
    Metric(
        "prediction_bias",
        "bias %",
        "%",
        100,
        False,
        False,
        lambda trial: percentile(prediction_errors(trial.log.answers), 0.5),
        has_ratio=False,
    ),
    Metric("machine", "machine %", "%", 100, False, False, lambda trial: trial.busy.machine, has_ratio=False),
)


def compared(
    trials: Sequence[Trial], title: Callable[[float], str], policies: Sequence[str], baseline: str
) -> list[LoadOutcome]:
    """Returns the outcome of every policy at each utilisation."""
    samples = [Sample(trial.round, title(trial.utilisation), trial.policy, trial) for trial in trials]
    return outcomes_of(samples, policies, baseline, METRICS)


def notes_of(trials: Sequence[Trial]) -> list[str]:
    """What trials themselves have to say, each once."""
    notes = []
    for trial in trials:
        where = f"round {trial.round + 1}, {trial.utilisation:g}, {trial.policy}"
        notes += [f"{where}: {note}" for note in trial.report.notes]
        notes += [f"{where}: {error.kind} ({error.example})" for error in trial.report.errors]
        if trial.busy.machine > CPU_SHARE_WORTH_A_NOTE:
            notes.append(f"{where}: this machine was {trial.busy.machine:.0%} busy; times are partly its own")
    return notes
