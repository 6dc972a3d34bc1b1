"""One line for each request that the router remembers: how long it took, and where it ran. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from twostroke.tracing.recorder import StreamTrace
from twostroke.tracing.span import Span

MOST_LISTED = 50
FIRST_TOKEN = "first token"


def latest_of(kept: Iterable[StreamTrace]) -> list[dict[str, Any]]:
    return [summary_of(each) for each in kept]


def slowest_of(kept: Iterable[StreamTrace]) -> list[dict[str, Any]]:
    """Returns at most `MOST_LISTED` requests, the slowest first."""
    lines = [summary_of(each) for each in kept]
    lines.sort(key=lambda line: -(line["duration_s"] or 0.0))
    return lines[:MOST_LISTED]


def summary_of(kept: StreamTrace) -> dict[str, Any]:
    """Returns what is known of a request. Fields of spans that have not ended are None."""
    root = _last(kept.spans, "request")
    about = {} if root is None else root.attributes
    answers = [span for span in kept.spans if span.name == "answer"]
    route = _last(kept.spans, "route")
    routed: Mapping[str, Any] = {} if route is None else route.attributes
    start_s = min((span.start_s for span in kept.spans), default=None) if root is None else root.start_s
    first_s = min((event.at_s for span in answers for event in span.events if event.name == FIRST_TOKEN), default=None)
    tokens = sum(int(span.attributes.get("tokens", 0)) for span in answers)
    return {
        "stream": kept.stream,
        "request": str(about.get("request_id", kept.stream.rpartition("~")[0] or kept.stream)),
        "status": str(about.get("status", "open")),
        "start_s": start_s,
        "duration_s": None if root is None else root.end_s - root.start_s,
        "first_token_s": None if first_s is None or start_s is None else first_s - start_s,
        "token_s": _token_s(answers),
        "prompt_tokens": _prompt_tokens(kept.spans),
        "cached_tokens": max((int(span.attributes.get("cached_tokens", 0)) for span in answers), default=None),
        "tokens": tokens if answers else None,
        "attempts": max((int(span.attributes.get("attempts", 0)) for span in answers), default=None),
        "decode": routed.get("decode"),
        "source": routed.get("source"),
    }


def _last(spans: Iterable[Span], name: str) -> Span | None:
    found = None
    for span in spans:
        if span.name == name:
            found = span
    return found


def _prompt_tokens(spans: Iterable[Span]) -> int | None:
    prepared = _last(spans, "prepare")
    count = None if prepared is None else prepared.attributes.get("prompt_tokens")
    return None if count is None else int(count)


def _token_s(answers: Iterable[Span]) -> float | None:
    """Returns the mean seconds between tokens of the longest answer. None: they are not known."""
    longest = max(answers, key=lambda span: int(span.attributes.get("tokens", 0)), default=None)
    if longest is None:
        return None
    gaps = int(longest.attributes.get("tokens", 0)) - 1
    first_s = next((event.at_s for event in longest.events if event.name == FIRST_TOKEN), None)
    return (longest.end_s - first_s) / gaps if gaps > 0 and first_s is not None else None
