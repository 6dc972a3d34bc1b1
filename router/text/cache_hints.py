"""Cache hints: a request may ask to keep the blocks of a prefix for a while (`cache_control`, as in Anthropic's API).

A hint is a wish: workers keep the blocks as a pin of the request's tenant, within a cap, and what they refuse changes
nothing about the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest
from twostroke.config.duration import duration_s
from twostroke.request import LONGEST_HINT_S

USUAL_S = 300.0
"""Seconds of a hint without a `ttl`, as in Anthropic's API."""
MOST_HINTS = 4
"""Most hints of a request, as in Anthropic's API: for each, its messages are rendered and tokenized once more."""


@dataclass(frozen=True, slots=True)
class MessageHint:
    """Asks to keep the blocks of a chat's first messages."""

    messages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TokenHint:
    """Asks to keep the blocks of a prompt's first tokens."""

    tokens: int
    seconds: float


def hint_s(value: Any, name: str) -> float:
    """Returns the seconds of a `cache_control` object. Raises InvalidRequest, naming the field."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object with type and ttl", field=name)
    if "type" not in value:
        raise InvalidRequest(f'{name}.type is missing; it must be "ephemeral"', field=name)
    if value["type"] != "ephemeral":
        raise InvalidRequest(f'{name}.type must be "ephemeral", got {shown(str(value["type"]))}', field=name)
    ttl = value.get("ttl")
    if ttl is None:
        return USUAL_S
    try:
        seconds = duration_s(ttl) if isinstance(ttl, str) else None
    except ValueError as error:
        raise InvalidRequest(f"{name}.ttl: {error}", field=f"{name}.ttl") from error
    if seconds is None:
        raise InvalidRequest(f'{name}.ttl must be a duration as text, for example "5m"', field=f"{name}.ttl")
    return checked_s(seconds, f"{name}.ttl")


def checked_s(seconds: float, name: str) -> float:
    if not 0 < seconds <= LONGEST_HINT_S:
        raise InvalidRequest(
            f"{name} must be more than 0 s and at most {LONGEST_HINT_S:g} s, got {seconds:g}", field=name
        )
    return seconds


def message_hints(messages: Sequence[Any], whole: Any) -> tuple[MessageHint, ...]:
    """Returns the hints of a chat as OpenAI's API writes its messages, the last `MOST_HINTS` of them.

    `cache_control` stands at a message, at a part of its content, or for all of the chat (`whole`).
    """
    hints = [
        MessageHint(index + 1, hint_s(value, f"messages[{index}].cache_control"))
        for index, entry in enumerate(messages)
        if (value := _of_message(entry)) is not None
    ]
    if whole is not None:
        hints.append(MessageHint(len(messages), hint_s(whole, "cache_control")))
    return tuple(hints[-MOST_HINTS:])


def _of_message(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return None
    parts = entry.get("content")
    inner = [part.get("cache_control") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    given = [value for value in (*inner, entry.get("cache_control")) if value is not None]
    return given[-1] if given else None
