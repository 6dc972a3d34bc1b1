"""The time of a request is explained in words."""

from __future__ import annotations

from router.console.explanation import choice_of, parts_of, remarks_on, spans_of
from twostroke.rpc.traces import span_to_message
from twostroke.rpc.v1 import control_pb2
from twostroke.tracing.span import Span, SpanEvent, TraceContext, Value

BEGIN_S = 1_800_000_000.0
PRICE = {"price.wait_s": 0.5, "price.prefill_s": 0.2}


def span(
    number: int, name: str, parent: int | None, start_ms: float, end_ms: float, *events: SpanEvent, **facts: Value
) -> control_pb2.TraceSpan:
    worker = name in ("attempt", "queue", "chunk", "decode", "pull", "prefill")
    return span_to_message(
        Span(
            name=name,
            process="decode-0" if worker else "router-0",
            context=TraceContext(1, number, is_sampled=False),
            parent_id=parent,
            start_s=BEGIN_S + start_ms / 1e3,
            end_s=BEGIN_S + end_ms / 1e3,
            attributes=facts,
            events=events,
            error=None,
        )
    )


def event(name: str, at_ms: float, **facts: Value) -> SpanEvent:
    return SpanEvent(name, BEGIN_S + at_ms / 1e3, facts)


OTHER = event("candidate", 2, decode="decode-1", source="local", peer="none", wait_s=0.9, prefill_s=0.3)
SLOW = [
    span(1, "request", None, 0, 2000, status="ok"),
    span(2, "answer", 1, 10, 1990, event("first token", 1000), tokens=11, outcome="length"),
    span(
        3, "route", 2, 10, 510, OTHER, policy="kv", decode="decode-0", source="local", peer="none", queued_s=0.5,
        first_token_s=0.1, **PRICE,
    ),
    span(4, "attempt", 2, 510, 1990),
    span(5, "queue", 4, 510, 610),
    span(6, "chunk", 4, 610, 900, tokens=64),
    span(7, "decode", 4, 1000, 1990, preemptions=1),
    span(8, "queue", 4, 1200, 1700),
]  # fmt: skip


def test_the_longest_parts_come_first_and_do_not_overlap() -> None:
    parts = parts_of(spans_of(SLOW))
    assert [part["name"] for part in parts] == [
        "queue", "preempted", "decode", "prefill", "worker queue", "rest",
    ]  # fmt: skip
    assert 0.97 < sum(part["share"] for part in parts) <= 1.0
    assert parts[0]["text"] == "500 ms in the router's queue, until a worker had room"
    prefill = next(part["text"] for part in parts if part["name"] == "prefill")
    assert prefill == "290 ms to compute 64 tokens of the prompt on decode-0"


def test_what_was_unusual_is_said() -> None:
    remarks = remarks_on(spans_of(SLOW))
    assert any("preempted once" in remark for remark in remarks)
    assert any("the router had foreseen 100 ms" in remark for remark in remarks)
    lost = span(2, "answer", None, 0, 10, event("reopened", 5, lost_worker="decode-3"))
    assert "decode-3 was lost" in remarks_on(spans_of([lost]))[0]


def test_the_choice_is_told_with_the_price_of_each_candidate() -> None:
    choice = choice_of(spans_of(SLOW))
    assert choice is not None
    assert choice["chosen"] == {
        "decode": "decode-0", "source": "local", "peer": "none", "terms": {"wait_s": 0.5, "prefill_s": 0.2},
    }  # fmt: skip
    assert choice["others"][0]["decode"] == "decode-1"
    assert choice["others"][0]["terms"] == {"wait_s": 0.9, "prefill_s": 0.3}
    assert round(choice["actual_s"], 2) == 0.99


def test_a_request_without_a_token_or_without_an_answer_is_explained_as_far_as_it_went() -> None:
    refused = [span(1, "request", None, 0, 100, status="InvalidRequest"), span(2, "prepare", 1, 0, 90)]
    assert [part["name"] for part in parts_of(spans_of(refused))] == ["prepare"]
    assert choice_of(spans_of(refused)) is None
    hopeless = [span(1, "request", None, 0, 100), span(2, "answer", 1, 0, 100)]
    assert [part["name"] for part in parts_of(spans_of(hopeless))] == ["no token"]
