"""Spans of several processes as lines of text."""

from __future__ import annotations

from cluster.commands.looking.trace import merged
from twostroke.rpc.traces import attributes_of, span_to_message
from twostroke.rpc.v1 import control_pb2
from twostroke.rpc.waterfall import lines_of, missing_of
from twostroke.tracing.span import Span, SpanEvent, TraceContext, Value

BEGIN_S = 1_800_000_000.0


def span(
    number: int, name: str, parent: int | None, start_ms: float, end_ms: float, **facts: Value
) -> control_pb2.TraceSpan:
    return span_to_message(
        Span(
            name=name,
            process="decode-0" if name in ("attempt", "chunk", "decode") else "router-0",
            context=TraceContext(1, number, is_sampled=False),
            parent_id=parent,
            start_s=BEGIN_S + start_ms / 1e3,
            end_s=BEGIN_S + end_ms / 1e3,
            attributes=facts,
            events=(SpanEvent("first token", BEGIN_S + 0.05, {}),) if name == "answer" else (),
            error="PeerLost()" if name == "decode" else None,
        )
    )


SPANS = [
    span(5, "decode", 4, 60, 100, tokens=9, steps=9, preemptions=0),
    *(span(10 + number, "chunk", 4, 30 + number, 31 + number, tokens=64) for number in range(6)),
    span(4, "attempt", 2, 20, 100, attempt=7, outcome="length"),
    span(
        3, "route", 2, 1, 20, decode="decode-0", attempt=7, peer="none", **{"price.wait_s": 0.25, "price.harm_s": 0.0}
    ),
    span(2, "answer", 1, 0.5, 100, tokens=9),
    span(1, "request", None, 0, 101, status="ok", resumptions=0),
]


def test_parts_stand_below_what_they_are_part_of_in_the_order_of_their_beginnings() -> None:
    lines = lines_of(SPANS)
    names = ["  " * line.depth + line.name for line in lines]
    assert names == [
        "request",
        "  answer",
        "    first token",
        "    route",
        "    attempt",
        "      6 chunks",
        "      decode",
    ]
    route = lines[3]
    assert (round(route.start_ms), round(route.length_ms or 0)) == (1, 19)
    assert route.facts == "decode=decode-0 price.wait_s=0.25"
    assert lines[0].facts == "status=ok"
    assert lines[5].facts == "tokens=384"
    assert lines[6].facts == "tokens=9 steps=9 preemptions=0 error=PeerLost()"
    assert lines[6].bar.startswith(" ")
    assert max(len(line.bar) for line in lines) == len(lines[0].bar)


def test_what_has_lost_its_parent_is_shown_nevertheless_and_a_worker_that_says_nothing_is_named() -> None:
    orphans = [one for one in SPANS if one.name in ("route", "chunk")]
    assert [line.name for line in lines_of(orphans)] == ["route", "6 chunks"]
    assert missing_of(SPANS) == []
    assert missing_of(orphans) == ["decode-0"]
    assert lines_of([]) == []


def test_parts_of_one_stream_that_several_routers_had_are_put_together() -> None:
    first = control_pb2.GetTraceResponse(stream="s", spans=SPANS[:8], silent=["decode-1"])
    second = control_pb2.GetTraceResponse(stream="s", spans=SPANS[6:])
    other = control_pb2.GetTraceResponse(stream="older", spans=[span(99, "request", None, -9000, -8000)])
    known = merged([other, first, second])
    assert (known.stream, len(known.spans), list(known.silent)) == ("s", len(SPANS), ["decode-1"])


def test_every_kind_of_attribute_survives_the_message() -> None:
    facts: dict[str, Value] = {"text": "a", "whole": -3, "real": 0.5, "flag": False}
    assert attributes_of(span(1, "route", None, 0, 1, **facts).attributes) == facts
