"""What a comparison draws of its requests: samples for its latency figures, and timelines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from tools.bench.measure import Record
from tools.figures.axes import Axis, linear_axis
from tools.figures.svg import BOTTOM, LEAST_STEP, LEFT, RIGHT, TOP, grid, label, svg

MOST_LANES = 32
"""Requests drawn of one run."""


def timeline_figure(records: Sequence[Record], endpoint: int, span_s: float, width: int = 960) -> str:
    """A lane per request: a bar from its sending to its first token, then a tick per event with tokens."""
    shown = sorted(records, key=lambda record: record.answer.sent_at_s)[:MOST_LANES]
    start_s = shown[0].answer.sent_at_s if shown else 0.0
    lane = 13 if len(shown) <= 16 else 8
    height = TOP + lane * len(shown) + BOTTOM
    x = linear_axis(span_s, (LEFT, width - RIGHT))
    parts = [grid(x, None, width, height), label(width - RIGHT, height - 2, "seconds", "end")]
    for row, record in enumerate(shown):
        parts += _lane(record, endpoint, start_s, TOP + lane * row, lane - 3, x)
    return svg(parts, width, height, "requests over time")


def span_of(records: Iterable[Record]) -> float:
    """Seconds from the first request sent to the last answer's end."""
    answers = [record.answer for record in records]
    return max(answer.ended_at_s for answer in answers) - min(answer.sent_at_s for answer in answers)


def inter_token_samples(records: Iterable[Record]) -> tuple[float, ...]:
    done = (record.answer for record in records if record.answer.failure is None)
    return tuple(later - earlier for answer in done for earlier, later in pairwise(answer.event_times_s))


def first_token_samples(records: Iterable[Record]) -> tuple[float, ...]:
    done = (record.answer for record in records if record.answer.failure is None and record.answer.event_times_s)
    return tuple(answer.event_times_s[0] - answer.sent_at_s for answer in done)


def _lane(record: Record, endpoint: int, start_s: float, top: float, tall: float, x: Axis) -> list[str]:
    answer = record.answer
    sent = x.at(answer.sent_at_s - start_s)
    first_s = answer.event_times_s[0] if answer.event_times_s else answer.ended_at_s
    first = x.at(first_s - start_s)
    title = f"request {record.planned.index}: first token after {1e3 * (first_s - answer.sent_at_s):.0f} ms"
    parts = [
        f'<rect class="wait e{endpoint}" x="{sent:.1f}" y="{top:.1f}" width="{max(0.5, first - sent):.1f}" '
        f'height="{tall:.1f}"><title>{title}</title></rect>'
    ]
    ticks = "".join(f"M{at:.1f} {top:.1f}v{tall:.1f}" for at in _apart(x.at(t - start_s) for t in answer.event_times_s))
    if ticks:
        parts.append(f'<path class="tick e{endpoint}" d="{ticks}"/>')
    if answer.failure is not None:
        parts.append(
            label(x.at(answer.ended_at_s - start_s), top + tall, f"failed: {answer.failure.kind}", "end", "bad")
        )
    return parts


def _apart(places: Iterable[float]) -> Iterable[float]:
    last = -1.0
    for place in places:
        if place - last >= LEAST_STEP:
            last = place
            yield place
