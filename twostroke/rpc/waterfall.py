"""Lays out the spans of one request, from all processes, as lines below each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from twostroke.rpc.traces import attributes_of
from twostroke.rpc.v1 import control_pb2
from twostroke.tracing.span import Value

BAR_COLUMNS = 32
MOST_CHUNKS = 4
"""Chunks of one parent that are shown one by one; more are one line."""
ROOT = "request"

FACTS: Mapping[str, tuple[str, ...]] = {
    "request": ("status", "resumptions"),
    "prepare": ("prompts", "prompt_tokens"),
    "answer": ("choice", "outcome", "tokens", "cached_tokens", "attempts"),
    "route": ("policy", "decode", "source", "peer", "peer_blocks", "queued_s", "first_token_s"),
    "attempt": ("known_tokens", "cached_tokens", "computed_tokens", "outcome"),
    "pull": ("source", "transport", "pages", "wanted_pages", "bytes", "wire_s", "is_from_peer", "is_stopped"),
    "prefill": ("tokens", "wanted_pages", "computed_pages", "computed_tokens"),
    "chunk": ("first_token", "tokens", "chunks"),
    "decode": ("tokens", "steps", "preemptions", "drafted_tokens", "kept_tokens", "speculation_saved_s"),
}
"""Attributes that are shown, by name of the span. Prices and forecasts of a route follow where they are not 0."""
EVERYDAY = {"resumptions": 0, "peer": "none", "peer_blocks": 0, "is_from_peer": False, "is_stopped": False, "chunks": 1}
"""Values that are not shown."""


@dataclass(frozen=True, slots=True)
class WaterfallLine:
    """A line for a span, or for an event in one."""

    depth: int
    """Number of lines that enclose it."""
    name: str
    process: str
    start_ms: float
    """Milliseconds since the trace began."""
    length_ms: float | None
    """Duration in milliseconds; None for an event."""
    bar: str
    facts: str


def lines_of(spans: Sequence[control_pb2.TraceSpan]) -> list[WaterfallLine]:
    """Returns the lines in order of their start, children below their parent."""
    if not spans:
        return []
    known = {span.span_id: span for span in spans}
    begin_s = min(span.start_s for span in known.values())
    scale = _Scale(begin_s, max(max(span.end_s for span in known.values()) - begin_s, 1e-9))
    parts: dict[int, list[control_pb2.TraceSpan]] = {}
    for span in sorted(known.values(), key=lambda span: (span.start_s, -span.end_s)):
        parts.setdefault(span.parent_id if span.parent_id in known else 0, []).append(span)
    return list(_below(0, parts, scale, depth=0))


def missing_of(spans: Sequence[control_pb2.TraceSpan]) -> list[str]:
    """Returns the workers that a stream was opened at and that sent no span of it."""
    values = [(span.name, span.process, attributes_of(span.attributes)) for span in spans]
    heard = {(process, facts.get("attempt")) for name, process, facts in values if name == "attempt"}
    opened = {(str(facts["decode"]), facts.get("attempt")) for _, _, facts in values if "decode" in facts}
    return sorted({worker for worker, _ in opened - heard})


@dataclass(frozen=True, slots=True)
class _Scale:
    begin_s: float
    length_s: float

    def ms(self, at_s: float) -> float:
        return (at_s - self.begin_s) * 1e3

    def bar(self, start_s: float, end_s: float) -> str:
        first = int((start_s - self.begin_s) / self.length_s * BAR_COLUMNS)
        last = max(first + 1, round((end_s - self.begin_s) / self.length_s * BAR_COLUMNS))
        first = min(first, BAR_COLUMNS - 1)
        return " " * first + "█" * (min(last, BAR_COLUMNS) - first)


def _below(
    parent_id: int, parts: Mapping[int, Sequence[control_pb2.TraceSpan]], scale: _Scale, depth: int
) -> Iterator[WaterfallLine]:
    children = parts.get(parent_id, ())
    chunks = [span for span in children if span.name == "chunk"]
    for span in children:
        if span.name == "chunk" and len(chunks) > MOST_CHUNKS:
            if span is chunks[0]:
                yield _sum_of(chunks, scale, depth)
            continue
        yield _line(span, scale, depth)
        for event in span.events:
            facts = _text(attributes_of(event.attributes).items())
            yield WaterfallLine(depth + 1, event.name, "", scale.ms(event.at_s), None, "", facts)
        yield from _below(span.span_id, parts, scale, depth + 1)


def _line(span: control_pb2.TraceSpan, scale: _Scale, depth: int) -> WaterfallLine:
    facts = facts_of(span)
    if span.HasField("error"):
        facts = f"{facts} error={span.error}".strip()
    return WaterfallLine(
        depth,
        span.name,
        span.process,
        scale.ms(span.start_s),
        (span.end_s - span.start_s) * 1e3,
        scale.bar(span.start_s, span.end_s),
        facts,
    )


def _sum_of(chunks: Sequence[control_pb2.TraceSpan], scale: _Scale, depth: int) -> WaterfallLine:
    values = [attributes_of(chunk.attributes) for chunk in chunks]
    count = sum(int(value.get("chunks", 1)) for value in values)
    tokens = sum(int(value.get("tokens", 0)) for value in values)
    start_s, end_s = chunks[0].start_s, max(chunk.end_s for chunk in chunks)
    length_ms, bar = (end_s - start_s) * 1e3, scale.bar(start_s, end_s)
    process = chunks[0].process
    return WaterfallLine(depth, f"{count} chunks", process, scale.ms(start_s), length_ms, bar, f"tokens={tokens}")


def facts_of(span: control_pb2.TraceSpan) -> str:
    values = attributes_of(span.attributes)
    shown = {name: values[name] for name in FACTS.get(span.name, ()) if name in values}
    why = {name: value for name, value in values.items() if "." in name and value}
    return _text({**{n: v for n, v in shown.items() if EVERYDAY.get(n) != v}, **why}.items())


def _text(facts: Iterable[tuple[str, Value]]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in facts)


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
