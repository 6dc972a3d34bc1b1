"""Replies of /v1/responses: one response object, or the events of it in order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from router.dialects.openai.logprobs import chat_logprob
from router.dialects.openai.reply import TEXT_PLACEHOLDER
from router.dialects.reply import LONG_BODY, Json, encoded, quoted, sse
from router.dialects.responses.output import ItemEvent, OutputItems
from router.dialects.responses.schema import ResponsesRequest
from router.requests.resume import Progress, StreamPoint
from router.text.output.events import TextEvent, Usage
from router.text.output.parts import Part, ReasoningPart, TextPart
from router.text.tokenizer import Text, token_text
from twostroke.base.errors import InvalidRequest, Overloaded, ServeError
from twostroke.request import FinishReason


class ResponsesReply:
    """Builds one response from its text events."""

    def __init__(
        self, request: ResponsesRequest, point: StreamPoint, model: str, text: Text, progress: Progress
    ) -> None:
        del progress  # a stream of this dialect is not resumed
        self._request = request
        self._text = text
        self._response_id = point.request_id
        self._model = model
        self._created_s = int(time.time())
        custom = request.given_tools.custom_names
        self._output = OutputItems(self._response_id, custom, encodes_reasoning=request.encodes_reasoning)
        self._usage: Usage | None = None
        self._tokens = self._reasoning_tokens = 0
        self._finish: FinishReason | None = None
        self._sequence = 0
        self._frames: dict[int, tuple[str, str]] = {}
        """What stands before the text, and between it and the sequence number, in each delta of a message.

        The keys are the messages' indices in the output.
        """

    def add(self, event: TextEvent) -> None:
        for _ in self._item_events(event):
            pass

    @property
    def is_long(self) -> bool:
        return self._tokens * (1 + self._request.options.shown_logprobs) > LONG_BODY

    def body(self) -> Json:
        return self._body(self._status)

    def messages(self, event: TextEvent) -> str:
        if event.finish is None and not self._request.has_logprobs:
            text = _plain_text(event)
            if text and self._output.add_text(text):
                self._tokens += 1
                return self._text_delta(text)
        begins = self._begun() if self._sequence == 0 else ""
        items = "".join(self._message(kind, fields) for kind, fields in self._item_events(event))
        return begins + items

    def end(self) -> str:
        return self._message(self._status, {"response": self.body()})

    def failure(self, error: ServeError) -> str:
        """Returns the event of a failed response, with the output so far."""
        failed = self._body("failed", error={"code": _code(error), "message": error.message})
        return self._message("failed", {"response": failed})

    def beat(self) -> str:
        return ": going on\n\n"

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def _item_events(self, event: TextEvent) -> Sequence[ItemEvent]:
        """Adds an event to the output, and returns the events of its items."""
        parts: Sequence[Part] = (TextPart(event.text),) if event.parts is None else event.parts
        logprobs = (
            []
            if event.token is None or not self._request.has_logprobs
            else [chat_logprob(self._text, partial(token_text, self._text), event.token)]
        )
        self._output.hold(logprobs)
        happened = [each for part in parts for each in self._output.add(part)]
        if event.token is not None:
            self._tokens += 1
            self._reasoning_tokens += self._output.is_reasoning or any(isinstance(p, ReasoningPart) for p in parts)
        if event.finish is not None:
            self._finish, self._usage = event.finish, event.usage
            happened += self._output.end(self._status)
        return happened

    def _begun(self) -> str:
        body = self._body("in_progress")
        return self._message("created", {"response": body}) + self._message("in_progress", {"response": body})

    def _text_delta(self, text: str) -> str:
        """Returns the event of a text that was added to the current message.

        Deltas of one message differ only in text and sequence number, so each is made from the same frame.
        """
        index = self._output.index
        frame = self._frames.get(index)
        if frame is None:
            sample = self._output.text_delta(TEXT_PLACEHOLDER)
            message = self._message(sample.kind, sample.fields, number=0)
            before, _, after = message.rpartition(quoted(TEXT_PLACEHOLDER))
            frame = self._frames[index] = before, after.removesuffix("0}\n\n")
        self._sequence += 1
        return f"{frame[0]}{quoted(text)}{frame[1]}{self._sequence - 1}}}\n\n"

    def _message(self, kind: str, fields: Json, number: int | None = None) -> str:
        name = f"response.{kind}"
        if number is None:
            number = self._sequence
            self._sequence += 1
        return sse(encoded({"type": name, **fields, "sequence_number": number}), event=name)

    def _body(self, status: str, error: Json | None = None) -> Json:
        request, tools = self._request, self._request.given_tools
        is_cut = status == "incomplete"
        return {
            "id": f"resp_{self._response_id}",
            "object": "response",
            "created_at": self._created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "frequency_penalty": request.options.frequency_penalty,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata,
            "model": self._model,
            "output": [] if status == "in_progress" else self._output.bodies(),
            "parallel_tool_calls": request.parallel_tool_calls,
            "presence_penalty": request.options.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": request.reasoning.effort, "summary": request.reasoning.summary},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": request.options.temperature,
            "text": request.text.shown,
            "tool_choice": tools.choice,
            "tools": list(tools.given),
            "top_logprobs": request.top_logprobs,
            "top_p": request.options.top_p,
            "truncation": "disabled",
            "usage": None if self._usage is None else self._usage_body(self._usage),
            **({"user": request.user} if request.user else {}),
        }

    def _usage_body(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _plain_text(event: TextEvent) -> str:
    """Returns the text of an event that has nothing else. Empty: it has other parts, or none."""
    if event.parts is None:
        return event.text
    part = event.parts[0] if len(event.parts) == 1 else None
    return part.text if isinstance(part, TextPart) else ""


def _code(error: ServeError) -> str:
    """Returns the nearest of the error codes that OpenAI's clients know."""
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
