"""What was seen on the wire, and what it comes to. Frozen values and pure functions; every time is a clock reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tools.bench.load import PlannedRequest


@dataclass(frozen=True, slots=True)
class Failure:
    kind: str
    """Few words that failures of one cause have in common: "timeout", "http 429", "grpc UNAVAILABLE"."""
    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it."""

    sent_at_s: float
    ended_at_s: float
    event_times_s: Sequence[float]
    """Arrival of every event that carried tokens. Empty where answers are not streamed."""
    output_tokens: int
    counted_by: str
    """The origin of `output_tokens`: "usage", "ids", or "events" (one token each, where the server says nothing)."""
    prompt_tokens: int | None
    cached_tokens: int | None
    """None where the server does not report them."""
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Record:
    planned: PlannedRequest
    due_at_s: float | None
    answer: Answer


@dataclass(frozen=True, slots=True)
class Distribution:
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ErrorCount:
    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Latencies, tokens and rates are those of completed requests."""

    duration_s: float
    """From the first request sent to the last answer's end."""
    requests: int
    completed: int
    failed: int
    errors: tuple[ErrorCount, ...]
    peak_open_requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Distribution | None
    inter_token_s: Distribution | None
    """Between events that carry tokens, over all requests."""
    tpot_s: Distribution | None
    """Per request: (last event - first event) / (output tokens - 1)."""
    end_to_end_s: Distribution | None
    send_lag_s: Distribution | None
    """Open loop: how much later than due a request was sent. The clock of its latencies starts when it was sent."""
    token_events: int
    client_cpu_s: float
    notes: tuple[str, ...]


CPU_SHARE_WORTH_A_NOTE = 0.7
"""Share of one core; above it, the client's own queueing shows in the latencies."""
LAG_WORTH_A_NOTE_S = 0.05
"""An open loop that sends later than this is no longer the load that was asked for."""


def summarise(records: Sequence[Record], client_cpu_s: float) -> Report:
    done = [record for record in records if record.answer.failure is None]
    answers = [record.answer for record in done]
    duration_s = max(r.answer.ended_at_s for r in records) - min(r.answer.sent_at_s for r in records)
    prompt_tokens = sum(_prompt_tokens(record) for record in done)
    output_tokens = sum(answer.output_tokens for answer in answers)
    reported_cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    lag = distribution(r.answer.sent_at_s - r.due_at_s for r in records if r.due_at_s is not None)
    return Report(
        duration_s=duration_s,
        requests=len(records),
        completed=len(done),
        failed=len(records) - len(done),
        errors=_errors(records),
        peak_open_requests=_peak_open(records),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(reported_cached) if reported_cached else None,
        requests_per_s=_rate(len(done), duration_s),
        output_tokens_per_s=_rate(output_tokens, duration_s),
        total_tokens_per_s=_rate(prompt_tokens + output_tokens, duration_s),
        ttft_s=distribution(a.event_times_s[0] - a.sent_at_s for a in answers if a.event_times_s),
        inter_token_s=distribution(later - earlier for a in answers for earlier, later in pairwise(a.event_times_s)),
        tpot_s=distribution(
            (a.event_times_s[-1] - a.event_times_s[0]) / (a.output_tokens - 1)
            for a in answers
            if len(a.event_times_s) > 1 and a.output_tokens > 1
        ),
        end_to_end_s=distribution(a.ended_at_s - a.sent_at_s for a in answers),
        send_lag_s=lag,
        token_events=sum(len(answer.event_times_s) for answer in answers),
        client_cpu_s=client_cpu_s,
        notes=tuple(_notes(done, lag, _rate(client_cpu_s, duration_s))),
    )


def distribution(samples: Iterable[float]) -> Distribution | None:
    """Returns the distribution of some samples. None without samples."""
    values = np.fromiter(samples, float)
    if not values.size:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Distribution(
        count=values.size, mean=float(values.mean()), p50=p50, p90=p90, p99=p99, max=float(values.max())
    )


def _prompt_tokens(record: Record) -> int:
    reported = record.answer.prompt_tokens
    return record.planned.prompt_tokens if reported is None else reported


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _errors(records: Sequence[Record]) -> tuple[ErrorCount, ...]:
    failures = [record.answer.failure for record in records if record.answer.failure is not None]
    examples = {failure.kind: failure.message for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return tuple(ErrorCount(kind, count, examples[kind]) for kind, count in counts.most_common())


def _peak_open(records: Sequence[Record]) -> int:
    """Returns the most requests that were open at once. An end and a start at the same reading do not overlap."""
    changes = sorted(
        change for record in records for change in ((record.answer.sent_at_s, 1), (record.answer.ended_at_s, -1))
    )
    peak = open_now = 0
    for _, change in changes:
        open_now += change
        peak = max(peak, open_now)
    return peak


def _notes(done: Sequence[Record], lag: Distribution | None, cpu_share: float) -> list[str]:
    notes = []
    answers = [record.answer for record in done if record.answer.event_times_s]
    events = sum(len(answer.event_times_s) for answer in answers)
    tokens = sum(answer.output_tokens for answer in answers)
    # One token per request is slack: the last may come without text, in an event that only says why the answer ended.
    if tokens > events + len(answers):
        notes.append(
            f"the server put {tokens / events:.2f} tokens into an event on average: inter-token latency is the time "
            "between events; tokens are counted by usage or ids"
        )
    if any(answer.counted_by == "events" for answer in answers):
        notes.append("the server reported no usage: every event was counted as one token")
    short = sum(record.answer.output_tokens < record.planned.output_tokens for record in done)
    if short:
        notes.append(f"{short} of {len(done)} answers were shorter than asked for: the server does not ignore EOS")
    if lag is not None and lag.p99 > LAG_WORTH_A_NOTE_S:
        notes.append(
            f"requests were sent late (p99 {lag.p99 * 1000:.0f} ms): the client could not keep up with the load"
        )
    if cpu_share > CPU_SHARE_WORTH_A_NOTE:
        notes.append(f"the client itself kept {cpu_share:.0%} of a core busy: latencies include its own delays")
    return notes
