"""What an OpenAI-compatible server says: SSE bytes to events, events to token counts, usage and errors. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class StreamError:
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Event:
    carries_tokens: bool
    id_count: int | None
    """Tokens in it, where the server sends ids along."""
    is_last: bool
    """It says why the answer ended."""
    usage: Usage | None
    error: StreamError | None


class SseLines:
    """Cuts a byte stream into the payloads of its `data:` lines (OpenAI's servers put an event on one line)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def parse_event(payload: bytes) -> Event:
    """Raises ValueError for what is not an event of OpenAI's API."""
    event = json.loads(payload)
    if not isinstance(event, dict):
        raise ValueError(f"an event must be an object, got {type(event).__name__}")
    choices = event.get("choices") or ()
    choice: dict[str, Any] = choices[0] if choices else {}
    ids = choice.get("token_ids")
    is_last = choice.get("finish_reason") is not None
    return Event(
        carries_tokens=bool(ids) or _has_text(choice, is_last),
        id_count=len(ids) if ids else None,
        is_last=is_last,
        usage=_usage(event.get("usage")),
        error=_error(event.get("error")),
    )


def error_message(body: bytes) -> str:
    """The message of an HTTP error's body, OpenAI's format or not."""
    try:
        event = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:200]
    found = _error(event.get("error") or event) if isinstance(event, dict) else None
    return found.message[:200] if found is not None else str(event)[:200]


def _has_text(choice: dict[str, Any], is_last: bool) -> bool:
    """Empty text is a token in the middle of a character, unless the event only opens or ends the answer."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        if delta.get("content") or delta.get("reasoning_content"):
            return True
        return "content" in delta and "role" not in delta and not is_last
    return bool(choice.get("text")) or ("text" in choice and not is_last)


def _usage(usage: Any) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens"))


def _error(error: Any) -> StreamError | None:
    if error is None:
        return None
    if isinstance(error, dict):
        kind = error.get("type") or error.get("code") or "error"
        return StreamError(str(kind), str(error.get("message") or error.get("detail") or error))
    return StreamError("error", str(error))
