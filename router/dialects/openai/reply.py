"""Responses of the OpenAI API: whole bodies, chunks of a stream, usage and logprobs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from router.dialects.openai.logprobs import (
    chat_logprob,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from router.dialects.openai.schema import OpenAIRequest
from router.dialects.openai.tool_calls import MessageDeltas, has_calls, message_of
from router.dialects.reply import LONG_BODY, ErrorForm, Json, encoded, finite, quoted, sse
from router.requests.resume import Progress, StreamPoint
from router.text.output.events import TextEvent, Usage
from router.text.output.parts import Part, ReasoningPart
from router.text.prompts import TokenPrompt
from router.text.tokenizer import Text, token_text
from twostroke.base.errors import ServeError
from twostroke.request import FinishReason, PromptLogprobs, SampledToken

TEXT_PLACEHOLDER = "text\0"
"""Text of a sample chunk, whose other characters are the frame of all chunks. No name or id has a zero character."""


def finish_reason(reason: FinishReason, *, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason is FinishReason.STOP else reason.value


def usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class OpenAIReply:
    """Builds the bodies of one response from its text events."""

    def __init__(self, request: OpenAIRequest, point: StreamPoint, model: str, text: Text, progress: Progress) -> None:
        self._request = request
        self._text = text
        kind, prefix = ("chat.completion", "chatcmpl") if request.is_chat else ("text_completion", "cmpl")
        self._object = kind
        self._head: Json = {"id": f"{prefix}-{point.request_id}", "created": int(time.time()), "model": model}
        self._has_parts = request.has_parts  # kept, because the property goes through all prompts
        self._choices = [
            _ChoiceReply(
                MessageDeltas(request.custom_names) if self._has_parts else None, is_opened=sent.tokens is not None
            )
            for sent in point.sent
        ]
        self._echoed: dict[int, Json] = {}
        """Logprobs of echoed prompts, by the prompt's index: made once for all of its choices."""
        if request.echo and request.options.logprobs is not None:
            chars = [
                sum(len(token_text(text, token)) for token in self._prompt_of(first).ids)
                for first in range(0, len(self._choices), request.options.n)
            ]
            for index, choice in enumerate(self._choices):
                choice.offset = chars[index // request.options.n]
        self._progress = progress
        self._usage: Usage | None = None

    def add(self, event: TextEvent) -> None:
        choice = self._choices[event.choice]
        choice.texts.append(event.text)
        if event.parts:
            choice.parts += event.parts
            choice.has_calls = choice.has_calls or has_calls(event.parts)
        if event.token is not None:
            choice.tokens.append(event.token)
        if event.finish is not None:
            choice.finish_reason = finish_reason(event.finish, has_calls=choice.has_calls)
        choice.prompt_logprobs = event.prompt_logprobs or choice.prompt_logprobs
        self._usage = event.usage or self._usage

    @property
    def is_long(self) -> bool:
        options = self._request.options
        tokens = sum(len(choice.tokens) for choice in self._choices) * (1 + options.shown_logprobs)
        if options.prompt_logprobs is not None or self._request.return_token_ids:
            shown = sum(len(self._prompt_of(index).ids) for index in range(len(self._choices)))
            tokens += shown * (1 + (options.prompt_logprobs or 0))
        return tokens > LONG_BODY

    def body(self) -> Json:
        assert self._usage is not None
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        body = {**self._head, "object": self._object, "choices": choices, "usage": usage_body(self._usage)}
        if self._request.prompt_logprobs is not None and self._request.is_chat:
            body["prompt_logprobs"] = self._prompt_logprobs(0)
        if self._request.return_token_ids and self._request.is_chat:
            body["prompt_token_ids"] = list(self._prompt_of(0).ids)
        return body

    def _prompt_logprobs(self, index: int) -> list[Json | None]:
        scores, most = self._choices[index].prompt_logprobs, self._request.prompt_logprobs or 0
        return prompt_logprobs(self._text, self._prompt_of(index).ids, scores, most)

    def messages(self, event: TextEvent) -> str:
        """Returns the messages of a stream for one event, each with the token by which a client can resume after it.

        An opening comes first: the role in a chat, or the prompt in a completion that echoes it.
        """
        choice = self._choices[event.choice]
        if choice.frame is not None and event.finish is None and not event.is_sent:
            token, (before, after) = self._progress.sent_token(event.choice), choice.frame
            if not event.text:
                return ""
            message = f"{before}{quoted(event.text)}{after}"
            return f"id: {token}\n{message}" if token else message
        messages = [sse(encoded(chunk), token=token) for token, chunk in self._chunks(event)]
        if self._is_plain and choice.frame is None:
            choice.frame = self._frame(event.choice)
        return "".join(messages)

    def end(self) -> str:
        return sse("[DONE]")

    def failure(self, error: ServeError) -> str:
        return sse(encoded(error_body(error)))

    def beat(self) -> str:
        return ": going on\n\n"

    @property
    def _is_plain(self) -> bool:
        """Whether chunks of one choice differ in nothing but their text."""
        wanted = self._request
        return not (
            wanted.has_parts
            or wanted.return_token_ids
            or wanted.options.logprobs is not None
            or wanted.stream_options.continuous_usage_stats
        )

    def _frame(self, index: int) -> tuple[str, str]:
        """Returns what stands before and after the text in every message of a choice, but for the resume token."""
        event = TextEvent(index, TEXT_PLACEHOLDER)
        message = sse(encoded(self._chunk({"index": index, **self._part(event)}, None, event, 0)))
        before, _, after = message.rpartition(quoted(TEXT_PLACEHOLDER))
        return before, after

    def _chunks(self, event: TextEvent) -> list[tuple[str, Json]]:
        choice, index = self._choices[event.choice], event.choice
        chunks = []
        if (self._request.is_chat or self._request.echo) and not choice.is_opened and not event.is_sent:
            opening = self._chunk({"index": index, **self._opening(event)}, None, event, 0)
            if (
                self._request.is_chat
                and self._request.return_token_ids
                and not any(other.is_opened for other in self._choices)
            ):
                opening["prompt_token_ids"] = list(self._prompt_of(index).ids)
            choice.is_opened = True
            chunks.append((self._progress.opened(index), opening))
        tokens = [] if event.token is None else [event.token]
        part: Json = {"index": index, **self._part(event)}
        if self._request.options.logprobs is not None:
            part["logprobs"] = self._logprobs(tokens, choice.offset) if tokens else None
            choice.offset += sum(len(token_text(self._text, token.token)) for token in tokens)
        if self._request.return_token_ids:
            part["token_ids"] = [token.token for token in tokens]
            if not choice.is_opened and not event.is_sent:
                choice.is_opened = True
                part["prompt_token_ids"] = list(self._prompt_of(index).ids)
        if event.parts:
            choice.has_calls = choice.has_calls or has_calls(event.parts)
        if not event.is_sent:
            token = self._progress.sent_token(index) if event.finish is None else self._progress.finished(index)
            reason = finish_reason(event.finish, has_calls=choice.has_calls) if event.finish else None
            if not self._is_held_back(event, part):
                chunks.append((token, self._chunk(part, reason, event, event.choice_tokens)))
        if event.usage is not None and self._request.stream_options.include_usage:
            usage = {**self._stream_head(), "choices": [], "usage": usage_body(event.usage)}
            chunks.append((self._progress.ended(), usage))
        return chunks

    def _opening(self, event: TextEvent) -> Json:
        """Returns what comes before the first token: a chat's role, or a completion's prompt."""
        if self._request.is_chat:
            return {"delta": {"role": "assistant", "content": ""}}
        part: Json = {"text": self._prompt_of(event.choice).text}
        if self._request.options.logprobs is not None:
            part["logprobs"] = self._echoed_logprobs(event.choice, event.prompt_logprobs)
        if self._request.return_token_ids:
            part |= {"token_ids": [], "prompt_token_ids": list(self._prompt_of(event.choice).ids)}
        return part

    def _prompt_of(self, index: int) -> TokenPrompt:
        prompt = self._request.prompts[index // self._request.options.n]
        assert isinstance(prompt, TokenPrompt), "it was prepared"
        return prompt

    def _echoed_logprobs(self, index: int, scores: PromptLogprobs | None) -> Json:
        options = self._request.options
        if scores is None:
            return echoed_logprobs(self._text, self._name, self._prompt_of(index).ids, None, 0)
        prompt = index // options.n
        if prompt not in self._echoed:
            ids = self._prompt_of(index).ids
            self._echoed[prompt] = echoed_logprobs(self._text, self._name, ids, scores, options.logprobs or 0)
        return self._echoed[prompt]

    def _parts_of(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Returns the parts of an answer without its reasoning, if the client does not want that."""
        return (
            parts
            if self._request.include_reasoning
            else [part for part in parts if not isinstance(part, ReasoningPart)]
        )

    def _part(self, event: TextEvent) -> Json:
        if not self._request.is_chat:
            return {"text": event.text}
        if event.parts is not None:
            deltas = self._choices[event.choice].deltas
            assert deltas is not None, "a request whose events have parts has a parser"
            return {"delta": deltas.delta_of(self._parts_of(event.parts), is_last=event.finish is not None)}
        return {"delta": {} if event.finish and not event.text else {"content": event.text}}

    def _is_held_back(self, event: TextEvent, part: Json) -> bool:
        """Returns whether the chunk would be empty: a parser, a possible stop string or an incomplete character holds
        its text back.
        """
        wanted = self._request
        says_more = wanted.return_token_ids or wanted.options.logprobs is not None
        is_empty = not event.text if event.parts is None else not part.get("delta")
        return is_empty and event.finish is None and not says_more

    def _chunk(self, part: Json, finish_reason: str | None, event: TextEvent, choice_tokens: int) -> Json:
        chunk = {**self._stream_head(), "choices": [{"logprobs": None, **part, "finish_reason": finish_reason}]}
        wanted = self._request.stream_options
        if not wanted.include_usage:
            return chunk
        so_far = Usage(event.prompt_tokens, choice_tokens, event.cached_tokens)
        return {**chunk, "usage": usage_body(so_far) if wanted.continuous_usage_stats else None}

    def _stream_head(self) -> Json:
        return {**self._head, "object": "chat.completion.chunk" if self._request.is_chat else self._object}

    def _whole(self, index: int, choice: _ChoiceReply) -> Json:
        text = "".join(choice.texts)
        whole: Json = {"index": index, "logprobs": None, "finish_reason": choice.finish_reason}
        if self._request.is_chat:
            parts, custom = self._parts_of(choice.parts), self._request.custom_names
            content = message_of(parts, custom) if self._has_parts else {"content": text}
            whole["message"] = {"role": "assistant", "refusal": None, **content}
        else:
            whole["text"] = self._prompt_of(index).text + text
        if self._request.options.logprobs is not None:
            whole["logprobs"] = self._logprobs(choice.tokens, choice.offset)
            if self._request.echo:
                whole["logprobs"] = joined(self._echoed_logprobs(index, choice.prompt_logprobs), whole["logprobs"])
        if self._request.prompt_logprobs is not None and not self._request.is_chat:
            whole["prompt_logprobs"] = self._prompt_logprobs(index)
        if self._request.return_token_ids:
            whole["token_ids"] = [token.token for token in choice.tokens]
            if not self._request.is_chat:
                whole["prompt_token_ids"] = list(self._prompt_of(index).ids)
        return whole

    def _logprobs(self, tokens: Sequence[SampledToken], offset: int) -> Json:
        if self._request.is_chat:
            return {"content": [chat_logprob(self._text, self._name, token) for token in tokens], "refusal": None}
        return self._completion_logprobs(tokens, offset)

    def _completion_logprobs(self, tokens: Sequence[SampledToken], offset: int) -> Json:
        ids = [token.token for token in tokens]
        tops: list[Json | None] = []
        for token in tokens:
            top = {self._name(other): finite(logprob) for other, logprob in token.top}
            tops.append({**top, self._name(token.token): finite(token.logprob)})
        logprobs = [finite(token.logprob) for token in tokens]
        return completion_logprobs(self._text, self._name, ids, logprobs, tops, offset)

    def _name(self, token: int) -> str:
        """Returns what logprobs call a token: its text, or its id where the client wants that."""
        return f"token_id:{token}" if self._request.return_tokens_as_token_ids else token_text(self._text, token)


class _ChoiceReply:
    """The output of one choice so far."""

    def __init__(self, deltas: MessageDeltas | None, *, is_opened: bool) -> None:
        self.deltas = deltas
        """Writes text, reasoning and tool calls as deltas. None: the answer has only text."""
        self.texts: list[str] = []
        self.parts: list[Part] = []
        self.has_calls = False
        self.tokens: list[SampledToken] = []
        self.finish_reason: str | None = None
        self.is_opened = is_opened
        self.frame: tuple[str, str] | None = None
        """What stands before and after the text in a chunk. None: not known yet, or chunks differ in more than text."""
        self.offset = 0
        """Characters before the next token in `text_offset`, those of an echoed prompt included."""
        self.prompt_logprobs: PromptLogprobs | None = None


def error_body(error: ServeError) -> Json:
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.field,
            "code": error.code,
        }
    }


ERRORS = ErrorForm(error_body)
