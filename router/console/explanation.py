"""Explains in words where the time of one request went, and why its workers were chosen. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.rpc.traces import attributes_of
from twostroke.rpc.v1 import control_pb2

FIRST_TOKEN, CANDIDATE = "first token", "candidate"
"""Names of the events of spans that are read here."""
NOTABLE_SHARE = 0.02
"""Share of the whole time up to which a part is left out."""
LATE_SHARE, LATE_S = 1.5, 0.05
"""A first token is late if it took more than `LATE_SHARE` times its prediction, and more than `LATE_S` longer."""

TERMS: Mapping[str, str] = {
    "wait_s": "wait until it can begin",
    "prefill_s": "computing the prompt",
    "transfer_s": "moving pages",
    "tail_s": "the first token's own step",
    "harm_s": "delay of other streams",
    "damage_s": "evicted pages, computed again later",
}
"""Terms of a price (router.routing.policy.Breakdown) in words."""


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span with its attributes as values."""

    name: str
    process: str
    span_id: int
    parent_id: int
    start_s: float
    end_s: float
    facts: Mapping[str, Any]
    events: Sequence[tuple[str, float, Mapping[str, Any]]]
    error: str | None

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def spans_of(messages: Sequence[control_pb2.TraceSpan]) -> list[ReceivedSpan]:
    """Returns the spans of messages, in the order in which they began."""
    spans = [
        ReceivedSpan(
            each.name,
            each.process,
            each.span_id,
            each.parent_id,
            each.start_s,
            each.end_s,
            attributes_of(each.attributes),
            [(event.name, event.at_s, attributes_of(event.attributes)) for event in each.events],
            each.error if each.HasField("error") else None,
        )
        for each in messages
    ]
    return sorted(spans, key=lambda span: span.start_s)


def parts_of(spans: Sequence[ReceivedSpan]) -> list[dict[str, Any]]:
    """Returns the parts of the request's time, each with its seconds and a sentence, the longest first.

    Parts do not overlap. Spans divide the time until the first token. What they do not cover is the part `rest`.
    """
    whole_s = _whole_s(spans)
    parts = [
        {"name": name, "seconds": seconds, "share": seconds / whole_s, "text": text}
        for name, seconds, text in _parts(spans)
        if seconds > NOTABLE_SHARE * whole_s
    ]
    return sorted(parts, key=lambda part: -float(part["seconds"]))


def remarks_on(spans: Sequence[ReceivedSpan]) -> list[str]:
    """Returns sentences about what was unusual, such as a lost worker, a preemption or a late first token."""
    return list(_remarks(spans))


def choice_of(spans: Sequence[ReceivedSpan]) -> dict[str, Any] | None:
    """Returns why the router chose the latest placement: the terms of its price, and of those of the next best
    candidates. None: no placement was traced.
    """
    routes = [span for span in spans if span.name == "route" and "decode" in span.facts]
    if not routes:
        return None
    facts = routes[-1].facts
    chosen = {name: facts.get(name) for name in ("decode", "source", "peer")}
    others = [
        {**{name: about.get(name) for name in ("decode", "source", "peer")}, "terms": _terms(about, "")}
        for event, _, about in routes[-1].events
        if event == CANDIDATE
    ]
    return {
        "policy": facts.get("policy", ""),
        "terms_in_words": TERMS,
        "chosen": {**chosen, "terms": _terms(facts, "price.")},
        "others": others,
        "forecast_s": facts.get("first_token_s"),
        "cached_blocks": facts.get("forecast.cached_blocks"),
        "computed_tokens": facts.get("forecast.computed_tokens"),
        "actual_s": _first_token_after(spans, routes[-1]),
    }


def _terms(facts: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {name: float(facts[prefix + name]) for name in TERMS if prefix + name in facts}


def _first_token_after(spans: Sequence[ReceivedSpan], route: ReceivedSpan) -> float | None:
    times = [at_s for span in spans if span.name == "answer" for name, at_s, _ in span.events if name == FIRST_TOKEN]
    after = [at_s - route.start_s for at_s in times if at_s >= route.start_s]
    return min(after, default=None)


def _whole_s(spans: Sequence[ReceivedSpan]) -> float:
    return max(max(span.end_s for span in spans) - min(span.start_s for span in spans), 1e-9)


def _parts(spans: Sequence[ReceivedSpan]) -> Iterator[tuple[str, float, str]]:
    answer = max((span for span in spans if span.name == "answer"), key=lambda span: span.length_s, default=None)
    prepared_s = _sum(spans, "prepare")
    yield "prepare", prepared_s, f"{_time(prepared_s)} to read the request and make tokens of it"
    if answer is None:
        return
    queued_s = sum(float(span.facts.get("queued_s", 0.0)) for span in spans if _is_in(span, answer, "route"))
    yield "queue", queued_s, f"{_time(queued_s)} in the router's queue, until a worker had room"
    first_s = next((at_s for name, at_s, _ in answer.events if name == FIRST_TOKEN), None)
    if first_s is None:
        yield "no token", answer.length_s - queued_s, f"{_time(answer.length_s - queued_s)} without any token"
        return
    yield from _before_the_first_token(spans, answer, first_s, queued_s)
    yield from _after_the_first_token(spans, answer, first_s)


def _before_the_first_token(
    spans: Sequence[ReceivedSpan], answer: ReceivedSpan, first_s: float, queued_s: float
) -> Iterator[tuple[str, float, str]]:
    early = [span for span in spans if answer.start_s <= span.start_s < first_s]
    worker_queue_s = _sum(early, "queue")
    yield "worker queue", worker_queue_s, f"{_time(worker_queue_s)} in queues of workers, behind other requests"
    chunks = [span for span in early if span.name == "chunk"]
    prefill_s, tokens = _sum(chunks, "chunk"), sum(int(span.facts.get("tokens", 0)) for span in chunks)
    where = " and ".join(sorted({span.process for span in chunks})) or "a worker"
    yield "prefill", prefill_s, f"{_time(prefill_s)} to compute {tokens:,} tokens of the prompt on {where}"
    pulls = [span for span in early if span.name == "pull"]
    pages = sum(int(span.facts.get("pages", 0)) for span in pulls)
    inner_s = sum(span.length_s for span in early if span.name == "prefill")
    pull_s = max(0.0, _sum(pulls, "pull") - inner_s)
    yield "transfer", pull_s, f"{_time(pull_s)} to move {pages} pages between workers, beside computing them"
    rest_s = first_s - answer.start_s - queued_s - worker_queue_s - prefill_s - pull_s
    yield "rest", rest_s, f"{_time(rest_s)} between these, until the first token had come"


def _after_the_first_token(
    spans: Sequence[ReceivedSpan], answer: ReceivedSpan, first_s: float
) -> Iterator[tuple[str, float, str]]:
    late = [span for span in spans if first_s <= span.start_s < answer.end_s]
    queue_s, again_s = _sum(late, "queue"), _sum(late, "chunk")
    yield "preempted", queue_s, f"{_time(queue_s)} in which its pages were others': it waited for room to continue"
    yield "computed again", again_s, f"{_time(again_s)} to compute again what had been evicted meanwhile"
    tokens, decode_s = int(answer.facts.get("tokens", 0)), answer.end_s - first_s - queue_s - again_s
    if tokens > 1:
        each = _time(decode_s / (tokens - 1))
        yield "decode", decode_s, f"{_time(decode_s)} for {tokens:,} tokens of output, one each {each}"


def _remarks(spans: Sequence[ReceivedSpan]) -> Iterator[str]:
    for span in spans:
        for name, _, facts in span.events:
            if name == "reopened":
                yield f"{facts.get('lost_worker', 'a worker')} was lost: the request went on elsewhere with its tokens"
            elif name == "migrated":
                yield f"it moved from {facts.get('worker', 'a worker')} to {facts.get('to', 'another')}, which drained"
            elif name == "refused":
                yield f"{facts.get('worker', 'a worker')} refused it: {facts.get('error', '')}"
    preemptions = sum(int(span.facts.get("preemptions", 0)) for span in spans if span.name == "decode")
    if preemptions:
        times = "once" if preemptions == 1 else f"{preemptions} times"
        yield f"it was preempted {times}: the pool of its decode worker was full, and other requests went first"
    choice = choice_of(spans)
    if choice is None or choice["actual_s"] is None or choice["forecast_s"] is None:
        return
    actual_s, forecast_s = float(choice["actual_s"]), float(choice["forecast_s"])
    if actual_s > LATE_SHARE * forecast_s and actual_s - forecast_s > LATE_S:
        yield f"its first token came after {_time(actual_s)}; the router had foreseen {_time(forecast_s)}"


def _is_in(span: ReceivedSpan, parent: ReceivedSpan, name: str) -> bool:
    return span.name == name and span.parent_id == parent.span_id


def _sum(spans: Sequence[ReceivedSpan], name: str) -> float:
    return sum(span.length_s for span in spans if span.name == name)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
