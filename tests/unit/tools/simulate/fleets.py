"""Runs that nobody simulated: what a fleet would do if a formula were true."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tools.simulate.fleet.results import EventUse, Gaps, RequestOutcome, SimulatedRun, Status, WorkerUse
from tools.simulate.runs import Trial, span_s
from tools.simulate.traces.formats import TraceRow
from tools.simulate.traces.trace import Trace
from twostroke.config import Role

BLOCK = 512
REQUESTS = 100


def even_trace(requests: int = REQUESTS, tokens: int = 5120, gap_s: float = 1.0) -> Trace:
    blocks = tokens // BLOCK
    rows = (TraceRow(gap_s * at, tokens, 100, tuple(range(at * blocks, (at + 1) * blocks))) for at in range(requests))
    return Trace("even", BLOCK, tuple(rows))


def run_of(trial: Trial, ttft_s: float, busy: float, itl_s: float = 0.02) -> SimulatedRun:
    """Every request alike."""
    rows, span = trial.trace.rows, span_s(trial.trace) / trial.rate_scale
    outcomes = tuple(
        RequestOutcome(
            index=at,
            status=Status.DONE,
            arrived_s=row.timestamp_s / trial.rate_scale,
            prompt_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            ttft_s=ttft_s,
            itl_mean_s=itl_s,
        )
        for at, row in enumerate(rows)
    )
    uses = tuple(_use(f"prefill-{number}", busy * span) for number in range(trial.shape.prefill))
    return SimulatedRun(
        policy=trial.variant,
        outcomes=outcomes,
        workers=uses,
        events=EventUse(),
        gaps=Gaps({Gaps.bucket_of(itl_s): 1}),
        span_s=span,
        duration_s=span,
        decisions=len(rows),
        decision_cpu_s=0.0,
        cpu_s=0.0,
    )


class Recording:
    """Runs by formula, and remembers what was asked for."""

    def __init__(self, formula: Callable[[Trial], SimulatedRun]) -> None:
        self._formula = formula
        self.batches: list[list[Trial]] = []

    def __call__(self, trials: Sequence[Trial]) -> list[SimulatedRun]:
        self.batches.append(list(trials))
        return [self._formula(trial) for trial in trials]

    @property
    def trials(self) -> list[Trial]:
        return [trial for batch in self.batches for trial in batch]


def _use(worker: str, busy_s: float) -> WorkerUse:
    return WorkerUse(worker=worker, role=Role.PREFILL, busy_s=busy_s, prefill_s=busy_s, prefill_span_s=busy_s)
