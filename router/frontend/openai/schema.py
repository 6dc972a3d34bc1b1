"""Bodies of the OpenAI API (and the fields that vLLM adds to it), checked and turned into the router's own types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.frontend.openai.chat_messages import message_of, tools_of
from router.frontend.openai.fields import Fields, as_number, is_token_list
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
from router.frontend.text.unicode import checked_utf8
from twostroke.errors import InvalidRequest, UnsupportedFeature
from twostroke.request import MAX_LOGIT_BIAS, MAX_LOGPROBS
from twostroke.rpc.channel import call_timeout_s

MAX_ID_DIGITS = 20
"""Of a token id that comes as text; Python refuses to read numbers of some thousands."""


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


def parse_chat(body: Mapping[str, Any]) -> OpenAIRequest:
    fields = Fields(body)
    wants_logprobs = fields.flag("logprobs")
    top_logprobs = fields.integer("top_logprobs")
    if top_logprobs is not None and not 0 <= top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {top_logprobs}", field="top_logprobs")
    if top_logprobs and not wants_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    return _parse(
        fields,
        is_chat=True,
        prompts=(_chat_prompt(fields),),
        logprobs=(top_logprobs or 0) if wants_logprobs else None,
    )


def parse_completion(body: Mapping[str, Any]) -> OpenAIRequest:
    fields = Fields(body)
    prompts = _prompts(fields.get("prompt"), fields.flag("split_special_tokens"))
    return _parse(fields, is_chat=False, prompts=prompts, logprobs=fields.integer("logprobs"))


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    fields = Fields(body)
    prompt: TextPrompt | ChatPrompt
    if fields.get("messages") is not None:
        prompt = _chat_prompt(fields)
    else:
        text = fields.string("prompt")
        if text is None:
            raise InvalidRequest("prompt (a string) or messages is needed", field="prompt")
        prompt = TextPrompt(text, fields.flag("split_special_tokens"))
    return TokenizeRequest(
        model=fields.string("model"),
        prompt=prompt,
        add_special_tokens=fields.flag("add_special_tokens", default=isinstance(prompt, TextPrompt)),
        return_token_strs=fields.flag("return_token_strs"),
    )


def parse_detokenize(body: Mapping[str, Any]) -> tuple[str | None, Sequence[int]]:
    """(model, token ids)."""
    fields = Fields(body)
    if fields.get("tokens") is None:
        raise InvalidRequest("tokens is needed", field="tokens")
    return fields.string("model"), fields.token_ids("tokens")


def _parse(fields: Fields, *, is_chat: bool, prompts: tuple[Prompt, ...], logprobs: int | None) -> OpenAIRequest:
    _refuse_unsupported(fields)
    stream_options = Fields(fields.mapping("stream_options"))
    return OpenAIRequest(
        is_chat=is_chat,
        model=fields.string("model"),
        prompts=prompts,
        options=_options(fields, logprobs),
        cache_salt=check_salt(fields.string("cache_salt") or ""),
        stream=fields.flag("stream"),
        include_usage=stream_options.flag("include_usage"),
        continuous_usage=stream_options.flag("continuous_usage_stats"),
        return_token_ids=fields.flag("return_token_ids"),
        timeout_s=check_timeout(fields.number("timeout"), "timeout"),
        # As in vLLM's and LiteLLM's servers, where lower goes first; everywhere else here, higher does.
        priority=priority_class(-(fields.integer("priority") or 0)),
        user=check_request_id(fields.string("user") or "", "user"),
    )


def check_timeout(timeout_s: float | None, name: str) -> float | None:
    """At most a day; more means a day, too."""
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise InvalidRequest(f"{name} must be a number of seconds, 0 or more, got {timeout_s}", field=name)
    return None if timeout_s is None else call_timeout_s(timeout_s)


def _refuse_unsupported(fields: Fields) -> None:
    for name, is_harmless in _HARMLESS.items():
        value = fields.get(name)
        if value is not None and not is_harmless(value):
            raise UnsupportedFeature(f"{name} is not supported by this server", field=name)
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != (fields.integer("n") or 1):
        raise UnsupportedFeature("best_of other than n is not supported by this server", field="best_of")


def _options(fields: Fields, logprobs: int | None) -> AnswerOptions:
    top_k = fields.integer("top_k")
    length = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    given: dict[str, Any] = {
        "n": fields.integer("n"),
        "min_tokens": fields.integer("min_tokens"),
        **{
            name: fields.number(name)
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
            )
        },
    }
    return AnswerOptions(
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=fields.integer(length),
        max_tokens_field=length,
        top_k=None if top_k in (0, -1) else top_k,
        logit_bias=_logit_bias(fields.mapping("logit_bias")),
        logprobs=logprobs,
        seed=fields.integer("seed"),
        stop=fields.strings("stop"),
        stop_token_ids=tuple(fields.token_ids("stop_token_ids")),
        ignore_eos=fields.flag("ignore_eos"),
        include_stop_str_in_output=fields.flag("include_stop_str_in_output"),
        skip_special_tokens=fields.flag("skip_special_tokens", default=True),
    )


def _logit_bias(entries: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    if len(entries) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias must be at most {MAX_LOGIT_BIAS} long, got {len(entries)}", field="logit_bias"
        )
    bias = []
    for key, value in entries.items():
        if not key.isdecimal() or len(key) > MAX_ID_DIGITS:
            raise InvalidRequest(f"logit_bias: {key[:MAX_ID_DIGITS]!r} is not a token id", field="logit_bias")
        bias.append((int(key), as_number(value, "logit_bias")))
    return tuple(bias)


def _prompts(value: Any, split_special_tokens: bool) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (TextPrompt(checked_utf8(value, "prompt"), split_special_tokens),)
    if not isinstance(value, list) or not value:
        raise InvalidRequest("prompt must be a string, a list of strings or token ids, and not empty", field="prompt")
    if is_token_list(value):
        return (TokenPrompt(value),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt must have at most {MAX_PROMPTS} entries, got {len(value)}", field="prompt")
    if all(isinstance(entry, str) for entry in value):
        return tuple(TextPrompt(checked_utf8(entry, "prompt"), split_special_tokens) for entry in value)
    if all(is_token_list(entry) for entry in value):
        return tuple(TokenPrompt(entry) for entry in value)
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists", field="prompt"
    )


def _chat_prompt(fields: Fields) -> ChatPrompt:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise InvalidRequest("messages must be a list of objects with role and content", field="messages")
    continues = fields.flag("continue_final_message")
    return ChatPrompt(
        messages=tuple(message_of(entry, f"messages[{rank}]") for rank, entry in enumerate(messages)),
        add_generation_prompt=fields.flag("add_generation_prompt", default=not continues),
        continue_final_message=continues,
        variables=fields.mapping("chat_template_kwargs"),
        tools=tools_of(fields),
    )
