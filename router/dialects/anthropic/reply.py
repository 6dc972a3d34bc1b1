"""Responses of Anthropic's Messages API: whole bodies, and the events of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.dialects.anthropic.content_blocks import ContentBlocks
from router.dialects.reply import ErrorForm, Json, sse, typed_event
from router.requests.client_request import AnswerRequest
from router.requests.resume import Progress, StreamPoint
from router.text.output.events import TextEvent, Usage
from router.text.output.parts import Part, TextPart
from router.text.prompts import TokenPrompt
from router.text.tokenizer import Text
from twostroke.base.errors import ContextLengthExceeded, Overloaded, RateLimitExceeded, ServeError
from twostroke.request import FinishReason

_PING = sse('{"type": "ping"}', event="ping")


class AnthropicReply:
    """Builds one message from its text events."""

    is_long = False

    def __init__(self, request: AnswerRequest, point: StreamPoint, model: str, text: Text, progress: Progress) -> None:
        del text, progress
        self._request = request
        self._request_id = point.request_id
        message_id = f"msg_{point.request_id}"
        self._head: Json = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._blocks = ContentBlocks(message_id)
        self._is_begun = False
        self._last: TextEvent | None = None

    def add(self, event: TextEvent) -> None:
        for part in _parts(event):
            self._blocks.add(part)
        self._last = event

    def body(self) -> Json:
        assert self._last is not None
        assert self._last.usage is not None
        content, usage = self._blocks.whole(), self._usage(self._last.usage)
        return {**self._head, "content": content, **self._stop(self._last), "usage": usage}

    def messages(self, event: TextEvent) -> str:
        begun = "" if self._is_begun else self._begin(event)
        deltas = "".join(map(self._blocks.events, _parts(event)))
        return f"{begun}{deltas}{self._finish(event)}" if event.finish else begun + deltas

    def end(self) -> str:
        return typed_event({"type": "message_stop"})

    def failure(self, error: ServeError) -> str:
        return typed_event({**error_body(error), "request_id": self._request_id})

    def beat(self) -> str:
        return _PING

    def _begin(self, event: TextEvent) -> str:
        self._is_begun = True
        usage = self._usage(Usage(event.prompt_tokens, event.choice_tokens, event.cached_tokens))
        stop = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head, "content": [], **stop, "usage": usage}
        return typed_event({"type": "message_start", "message": message}) + _PING

    def _finish(self, event: TextEvent) -> str:
        assert event.usage is not None
        delta = {"type": "message_delta", "delta": self._stop(event), "usage": self._usage(event.usage)}
        return self._blocks.end() + typed_event(delta)

    def _stop(self, event: TextEvent) -> Json:
        return {"stop_reason": self._stop_reason(event), "stop_sequence": event.stop_string}

    def _stop_reason(self, event: TextEvent) -> str:
        if event.finish is FinishReason.LENGTH:
            options = self._request.options
            is_all = options.is_prompt_only or event.choice_tokens >= (options.max_tokens or 0)
            return "max_tokens" if is_all else "model_context_window_exceeded"
        if event.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.has_calls else "end_turn"

    def _usage(self, usage: Usage) -> Json:
        """Returns the usage in Anthropic's terms.

        Prompt tokens that were not cached count as written to the cache up to the last hint, and as input after it.
        """
        prompts = self._request.prompts
        hints = [hint.tokens for prompt in prompts if isinstance(prompt, TokenPrompt) for hint in prompt.hints]
        written = max(0, max(hints, default=0) - usage.cached_tokens)
        return _usage_body(
            usage.prompt_tokens - usage.cached_tokens - written, written, usage.cached_tokens, usage.completion_tokens
        )


def _parts(event: TextEvent) -> Sequence[Part]:
    if event.parts is not None:
        return event.parts
    return (TextPart(event.text),) if event.text else ()


def _usage_body(new: int, written: int, cached: int, output: int) -> Json:
    return {
        "input_tokens": new,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


_STATUSES: Mapping[type[ServeError], int] = {Overloaded: 529, RateLimitExceeded: 429}
"""Statuses that differ from those of OpenAI's API. In Anthropic's, 429 says that the client's own limit is used up."""

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Types by status, where they are neither `invalid_request_error` (below 500) nor `api_error`. Anthropic's API has no
503. It stays one here because gateways send such requests to another router."""


def error_body(error: ServeError) -> Json:
    status = _STATUSES.get(type(error), error.http_status)
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


ERRORS = ErrorForm(error_body, _STATUSES, has_request_id=True)


def _message(error: ServeError) -> str:
    """Returns the error's message. If the prompt is too long, it is what Claude Code and other agents search for."""
    if not isinstance(error, ContextLengthExceeded):
        return error.message
    if error.tokens is None or error.most_tokens is None:
        return f"prompt is too long: {error.message}"
    return f"prompt is too long: {error.tokens} tokens > {error.most_tokens} maximum"
