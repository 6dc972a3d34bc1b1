"""Spans <-> messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from twostroke.rpc.v1 import control_pb2
from twostroke.tracing.recorder import Recorder
from twostroke.tracing.span import Span, Value


def known_of(recorder: Recorder, name: str) -> control_pb2.GetTraceResponse:
    """Returns what a process says about a request or a stream."""
    kept = recorder.find(name)
    if kept is None:
        return control_pb2.GetTraceResponse(forgotten=recorder.has_forgotten(name))
    return control_pb2.GetTraceResponse(stream=kept.stream, spans=map(span_to_message, kept.spans))


def span_to_message(span: Span) -> control_pb2.TraceSpan:
    return control_pb2.TraceSpan(
        name=span.name,
        process=span.process,
        trace_id=f"{span.context.trace_id:032x}",
        span_id=span.context.span_id,
        parent_id=span.parent_id or 0,
        start_s=span.start_s,
        end_s=span.end_s,
        attributes=_attributes(span.attributes),
        events=[
            control_pb2.TraceEvent(name=event.name, at_s=event.at_s, attributes=_attributes(event.attributes))
            for event in span.events
        ],
        error=span.error,
    )


def attributes_of(messages: Iterable[control_pb2.TraceAttribute]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for message in messages:
        kind = message.WhichOneof("value")
        if kind is not None:
            values[message.name] = getattr(message, kind)
    return values


def _attributes(values: Mapping[str, Value]) -> list[control_pb2.TraceAttribute]:
    return [_attribute(name, value) for name, value in values.items()]


def _attribute(name: str, value: Value) -> control_pb2.TraceAttribute:
    match value:
        case bool():
            return control_pb2.TraceAttribute(name=name, flag=value)
        case int():
            return control_pb2.TraceAttribute(name=name, whole=value)
        case float():
            return control_pb2.TraceAttribute(name=name, number=value)
        case str():
            return control_pb2.TraceAttribute(name=name, text=value)
