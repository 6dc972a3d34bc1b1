"""What a dialect writes of an answer: one JSON body, or server-sent events."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.text.output.events import TextEvent
from twostroke.base.errors import ServeError

Json = dict[str, Any]
JSON_LENGTH_HEADER = "inference-header-content-length"
"""Triton's header for a body of JSON and raw bytes after it. Its value is the length of the JSON in bytes."""
LONG_BODY = 1000
"""A whole response with more tokens and top logprobs than this is long: each takes some microseconds to write."""
LEAST_LOGPROB = -9999.0
"""Logprob that is written instead of minus infinity, which JSON does not have."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class JsonWithBytes:
    """A response whose JSON is followed by bytes. A header says how long the JSON is."""

    json: Json
    raw_bytes: bytes


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How a dialect writes errors."""

    body: Callable[[ServeError], Json]
    """Returns the body of the response to a request that failed with this error."""
    statuses: Mapping[type[ServeError], int] = field(default_factory=dict)
    """HTTP statuses by class of error, if they differ from `ServeError.http_status`."""
    has_request_id: bool = False
    """Whether the body has the request's id, too, as `request_id`."""


class Reply(Protocol):
    """Builds the response to one request from its events."""

    def add(self, event: TextEvent) -> None:
        """Keeps an event for `body`."""

    @property
    def is_long(self) -> bool:
        """Whether the body takes more than some milliseconds to make."""

    def body(self) -> Json | JsonWithBytes:
        """Returns the whole response; every event must have been added."""

    def messages(self, event: TextEvent) -> str:
        """Returns the server-sent events of a stream for one event of the output. Empty: nothing is to be sent yet."""

    def end(self) -> str:
        """Returns the server-sent events that end a stream, after the messages of the last event."""

    def failure(self, error: ServeError) -> str:
        """Returns the server-sent events that end a stream with an error."""

    def beat(self) -> str:
        """Returns a keep-alive message for a stream in which nothing else is sent."""


quoted = json.encoder.encode_basestring
"""Returns a text as JSON."""


def encoded(value: Json) -> str:
    return _ENCODER.encode(value)


def sse(data: str, *, event: str = "", token: str = "") -> str:
    """Returns a server-sent event. `token` is what a client sends to resume after it, `event` the event's type.

    In dialects without event types, only clients that ask for them get comments and lines other than `data`: stock
    clients take each line for a message, or drop messages with other lines.
    """
    head = (f"id: {token}\n" if token else "") + (f"event: {event}\n" if event else "")
    return f"{head}data: {data}\n\n"


def typed_event(value: Json) -> str:
    """Returns a server-sent event whose type is the `type` of the object."""
    return sse(encoded(value), event=value["type"])


def finite(logprob: float | None) -> float:
    """Returns a logprob that JSON can express: `LEAST_LOGPROB` if it is None or infinite."""
    return LEAST_LOGPROB if logprob is None or not math.isfinite(logprob) else logprob
