"""Figures as inline SVG: latency over percentile, and a timeline of requests. Pure; colours are the page's classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from cluster.bench.compare.axes import Axis, linear_axis, log_axis, tail_axis
from cluster.bench.measure import Record, percentile

MOST_LANES = 32
"""Requests drawn of one run."""
_LEAST_STEP = 0.5
"""Pixels: what is nearer to the mark before is not drawn."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 30


@dataclass(frozen=True, slots=True)
class Series:
    """All samples of one endpoint, in seconds."""

    endpoint: int
    """Its number: the page gives it a colour."""
    samples: tuple[float, ...]


def latency_figure(series: Sequence[Series], width: int = 470, height: int = 240) -> str:
    """Milliseconds (log) over the share of samples below them, stretched towards the tail."""
    in_ms = [(each.endpoint, sorted(1e3 * sample for sample in each.samples)) for each in series]
    x = tail_axis((_LEFT, width - 2 * _RIGHT))
    y = log_axis(*_bounds([values for _, values in in_ms if values]), (height - _BOTTOM, _TOP))
    parts = [_grid(x, y, width, height), _label(_LEFT - 44, _TOP + 2, "ms", "start")]
    parts += [f'<path class="line e{number}" d="{_percentile_path(values, x, y)}"/>' for number, values in in_ms]
    return _svg(parts, width, height, "latency in milliseconds over percentiles")


def timeline_figure(records: Sequence[Record], endpoint: int, span_s: float, width: int = 960) -> str:
    """A lane per request: a bar from its sending to its first token, then a tick per event with tokens."""
    shown = sorted(records, key=lambda record: record.answer.sent_at_s)[:MOST_LANES]
    start_s = shown[0].answer.sent_at_s if shown else 0.0
    lane = 13 if len(shown) <= 16 else 8
    height = _TOP + lane * len(shown) + _BOTTOM
    x = linear_axis(span_s, (_LEFT, width - _RIGHT))
    parts = [_grid(x, None, width, height), _label(width - _RIGHT, height - 2, "seconds", "end")]
    for row, record in enumerate(shown):
        parts += _lane(record, endpoint, start_s, _TOP + lane * row, lane - 3, x)
    return _svg(parts, width, height, "requests over time")


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
            _label(x.at(answer.ended_at_s - start_s), top + tall, f"failed: {answer.failure.kind}", "end", "bad")
        )
    return parts


def _bounds(ordered: Sequence[Sequence[float]]) -> tuple[float, float]:
    """To the highest; from the least that is no accident: events that arrive together are no time apart."""
    low = min((max(percentile(values, 2), percentile(values, 50) / 10) for values in ordered), default=1.0)
    high = max(1e-3, max((values[-1] for values in ordered), default=1.0))
    return low or high / 1e3, high


def _percentile_path(ordered: Sequence[float], x: Axis, y: Axis) -> str:
    """Steps would hide in the tail what the few samples there are: sample i of n stands at (i + 1/2) / n."""
    points, last = [], -1.0
    for index, value in enumerate(ordered):
        at = x.at(100 * (index + 0.5) / len(ordered))
        if at - last >= _LEAST_STEP or index == len(ordered) - 1:
            points.append(f"{at:.1f} {y.at(value):.1f}")
            last = at
    return "M" + "L".join(points) if points else ""


def _apart(places: Iterable[float]) -> Iterable[float]:
    last = -1.0
    for place in places:
        if place - last >= _LEAST_STEP:
            last = place
            yield place


def _grid(x: Axis, y: Axis | None, width: int, height: int) -> str:
    bottom = height - _BOTTOM
    lines = [f"M{at:.1f} {_TOP}V{bottom}" for at, _ in x.ticks]
    labels = [_label(at, bottom + 14, label, "middle") for at, label in x.ticks]
    if y is not None:
        lines += [f"M{_LEFT} {at:.1f}H{width - _RIGHT}" for at, _ in y.ticks]
        labels += [_label(_LEFT - 6, at + 4, label, "end") for at, label in y.ticks]
    return f'<path class="grid" d="{"".join(lines)}"/>' + "".join(labels)


def _label(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], width: int, height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
