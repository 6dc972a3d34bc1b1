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
"""Header of Triton's that says how many bytes of a body are JSON, where others follow."""
LONG_BODY = 1000
"""Tokens and top logprobs from which on a whole response is long; each takes some microseconds."""
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class JsonWithBytes:
    """A response whose JSON is followed by bytes. A header says how long the JSON is."""

    json: Json
    behind: bytes


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How the clients of a dialect are told of errors."""

    body: Callable[[ServeError], Json]
    """Returns an error as the body that they expect."""
    statuses: Mapping[type[ServeError], int] = field(default_factory=dict)
    """HTTP statuses of errors where they are not those that `ServeError.http_status` says."""
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
        """Returns the messages of a stream for one event, each a whole server-sent event. Empty: there is none yet."""

    def end(self) -> str:
        """Returns what follows the last event's messages, and ends a stream."""

    def failure(self, error: ServeError) -> str:
        """Returns what ends a stream that has begun and failed."""

    def beat(self) -> str:
        """Returns a sign of life for a stream in which nothing else happens."""


quoted = json.encoder.encode_basestring
"""Returns a text as JSON."""


def encoded(value: Json) -> str:
    return _ENCODER.encode(value)


def sse(data: str, *, event: str = "", token: str = "") -> str:
    """Returns a server-sent event. `token` is what a client sends to resume after it, `event` the event's type.

    Only clients that ask for it get comments and lines other than data: stock clients take each line for a message, or
    drop messages with other lines.
    """
    head = (f"id: {token}\n" if token else "") + (f"event: {event}\n" if event else "")
    return f"{head}data: {data}\n\n"


def typed_event(value: Json) -> str:
    """Returns a server-sent event of the type that its object names."""
    return sse(encoded(value), event=value["type"])


def finite(logprob: float | None) -> float:
    """Returns a logprob as JSON can say it."""
    return LEAST_LOGPROB if logprob is None or not math.isfinite(logprob) else logprob
