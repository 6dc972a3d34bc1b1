"""Bodies of the OpenAI API (and the fields that vLLM adds to it), checked and turned into the router's own types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from router.frontend.json_body import Body, Integer, Number, TokenIds, is_token_list
from router.frontend.openai.chat_messages import message_of, tools_of
from router.frontend.params import (
    MAX_PROMPTS,
    AnswerOptions,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_request_id,
    check_salt,
    priority_class,
)
from twostroke.errors import InvalidRequest, UnsupportedFeature
from twostroke.request import MAX_LOGPROBS
from twostroke.rpc.channel import call_timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest:
    """One parsed body of /v1/chat/completions or /v1/completions."""

    is_chat: bool
    model: str | None
    prompts: tuple[Prompt, ...]
    options: AnswerOptions
    cache_salt: bytes
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Every chunk says how many tokens its choice has so far, as in vLLM; only with `include_usage`."""
    return_token_ids: bool
    timeout_s: float | None
    priority: int
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    model: str | None
    prompt: TextPrompt | ChatPrompt
    add_special_tokens: bool
    return_token_strs: bool


def _is_empty(value: Any) -> bool:
    return not value


_HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": _is_empty,
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": lambda value: isinstance(value, dict) and value.get("type") == "text",
    "audio": _is_empty,
    "modalities": lambda value: value == ["text"],
    "prediction": _is_empty,
    "web_search_options": lambda value: value is None,
    "echo": _is_empty,
    "suffix": _is_empty,
    "prompt_logprobs": lambda value: value is None,
    "prompt_embeds": _is_empty,
    "truncate_prompt_tokens": lambda value: value is None,
    "use_beam_search": _is_empty,
    "length_penalty": lambda value: value == 1,
    "allowed_token_ids": lambda value: value is None,
    "bad_words": _is_empty,
    "structured_outputs": _is_empty,
    "guided_json": lambda value: value is None,
    "guided_regex": lambda value: value is None,
    "guided_choice": lambda value: value is None,
    "guided_grammar": lambda value: value is None,
    "chat_template": _is_empty,
    "documents": _is_empty,
}
"""Fields whose effect is not offered here, and the values that ask for none. Other unknown fields are ignored, as
OpenAI's servers and vLLM do."""


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class AnswerBody(Body):
    """What bodies of /v1/chat/completions and /v1/completions have in common."""

    model: str | None = None
    best_of: Integer | None = None
    stream: bool = False
    stream_options: StreamOptions = Field(default=StreamOptions(), strict=False)
    return_token_ids: bool = False
    timeout: Number | None = None
    priority: Integer = 0
    user: str = ""
    cache_salt: str = ""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        for name, is_harmless in _HARMLESS.items():
            value = values.get(name)
            if value is not None and not is_harmless(value):
                raise UnsupportedFeature(f"{name} is not supported by this server", field=name)
        return values


class ChatFields(Body):
    messages: list[Any] = Field(description="a list of objects with role and content")
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: Any = None
    tool_choice: Any = None

    @property
    def prompt(self) -> ChatPrompt:
        continues, adds = self.continue_final_message, self.add_generation_prompt
        return ChatPrompt(
            messages=tuple(message_of(entry, f"messages[{rank}]") for rank, entry in enumerate(self.messages)),
            add_generation_prompt=not continues if adds is None else adds,
            continue_final_message=continues,
            variables=self.chat_template_kwargs,
            tools=tools_of(self.tools, self.tool_choice),
        )


class ChatLogprobs(Body):
    logprobs: bool = False
    top_logprobs: Integer | None = None

    @property
    def most(self) -> int | None:
        most = self.top_logprobs or 0
        if not 0 <= most <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {most}", field="top_logprobs")
        if most and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        return most if self.logprobs else None


class TextFields(Body):
    prompt: Any = None
    split_special_tokens: bool = False


class TokenizeBody(Body):
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds


def parse_chat(body: Mapping[str, Any]) -> OpenAIRequest:
    logprobs = ChatLogprobs.read(body).most
    return _request(body, (ChatFields.read(body).prompt,), logprobs, is_chat=True)


def parse_completion(body: Mapping[str, Any]) -> OpenAIRequest:
    text = TextFields.read(body)
    return _request(body, _prompts(text.prompt, text.split_special_tokens), body.get("logprobs"), is_chat=False)


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    parsed = TokenizeBody.read(body)
    prompt: TextPrompt | ChatPrompt
    if body.get("messages") is not None:
        prompt = ChatFields.read(body).prompt
    else:
        text = TextFields.read(body)
        if not isinstance(text.prompt, str):
            raise InvalidRequest("prompt (a string) or messages is needed", field="prompt")
        prompt = TextPrompt(text.prompt, text.split_special_tokens)
    adds = isinstance(prompt, TextPrompt) if parsed.add_special_tokens is None else parsed.add_special_tokens
    return TokenizeRequest(
        model=parsed.model, prompt=prompt, add_special_tokens=adds, return_token_strs=parsed.return_token_strs
    )


def parse_detokenize(body: Mapping[str, Any]) -> tuple[str | None, Sequence[int]]:
    """(model, token ids)."""
    parsed = DetokenizeBody.read(body)
    return parsed.model, parsed.tokens


def _request(
    body: Mapping[str, Any], prompts: tuple[Prompt, ...], logprobs: int | None, *, is_chat: bool
) -> OpenAIRequest:
    parsed, options = AnswerBody.read(body), _options(body, logprobs)
    if parsed.best_of is not None and parsed.best_of != options.n:
        raise UnsupportedFeature("best_of other than n is not supported by this server", field="best_of")
    return OpenAIRequest(
        is_chat=is_chat,
        model=parsed.model,
        prompts=prompts,
        options=options,
        cache_salt=check_salt(parsed.cache_salt),
        stream=parsed.stream,
        include_usage=parsed.stream_options.include_usage,
        continuous_usage=parsed.stream_options.continuous_usage_stats,
        return_token_ids=parsed.return_token_ids,
        timeout_s=check_timeout(parsed.timeout, "timeout"),
        # As in vLLM's and LiteLLM's servers, where lower goes first; everywhere else here, higher does.
        priority=priority_class(-parsed.priority),
        user=check_request_id(parsed.user, "user"),
    )


def _options(body: Mapping[str, Any], logprobs: int | None) -> AnswerOptions:
    length = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    top_k = body.get("top_k")
    special = {
        "max_tokens": body.get(length),
        "max_tokens_field": length,
        "top_k": None if top_k in (0, -1) else top_k,
        "logprobs": logprobs,
    }
    return AnswerOptions.read({**body, **special})


def check_timeout(timeout_s: float | None, name: str) -> float | None:
    """At most a day; more means a day, too."""
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise InvalidRequest(f"{name} must be a number of seconds, 0 or more, got {timeout_s}", field=name)
    return None if timeout_s is None else call_timeout_s(timeout_s)


def _prompts(value: Any, split_special_tokens: bool) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (TextPrompt(value, split_special_tokens),)
    if not isinstance(value, list) or not value:
        raise InvalidRequest("prompt must be a string, a list of strings or token ids, and not empty", field="prompt")
    if is_token_list(value):
        return (TokenPrompt(value),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt must have at most {MAX_PROMPTS} entries, got {len(value)}", field="prompt")
    if all(isinstance(entry, str) for entry in value):
        return tuple(TextPrompt(entry, split_special_tokens) for entry in value)
    if all(is_token_list(entry) for entry in value):
        return tuple(TokenPrompt(entry) for entry in value)
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists", field="prompt"
    )
