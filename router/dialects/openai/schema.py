"""Bodies of the OpenAI API (and the fields that vLLM adds to it), checked and turned into the router's own types."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from pydantic import Field, model_validator

from router.dialects.openai.chat_messages import message_of, tool_use_of, tools_of
from router.dialects.openai.chat_tools import ChatTools, read_chat_tools
from router.dialects.openai.custom_tools import keeps_inputs
from router.json_body import Body, Integer, TokenIds, is_token_list
from router.requests.client_request import AnswerRequest
from router.requests.params import MAX_PROMPTS, AnswerOptions
from router.text.cache_hints import TokenHint, hint_s, message_hints
from router.text.output.framing import ToolUse
from router.text.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.text.structured.fields import STRUCTURED, structured_output
from twostroke.base.errors import InvalidRequest, UnsupportedFeature
from twostroke.request import MAX_LOGPROBS


def is_empty(value: Any) -> bool:
    return not value


def is_never(value: Any) -> bool:
    return False


HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    "functions": is_empty,
    "function_call": lambda value: value in ("none", "auto"),
    "audio": is_empty,
    "modalities": lambda value: value == ["text"],
    "prediction": is_empty,
    "web_search_options": is_never,
    "prompt_embeds": is_empty,
    "truncate_prompt_tokens": is_never,
    "use_beam_search": is_empty,
    "length_penalty": lambda value: value == 1,
    "bad_words": is_empty,
    "documents": is_empty,
    "no_repeat_ngram_size": is_empty,
    "typical_p": lambda value: value == 1,
    "tfs_z": lambda value: value == 1,
    "top_a": is_empty,
    "mirostat": is_empty,
    "dry_multiplier": is_empty,
    "xtc_probability": is_empty,
    "images": is_empty,
    "json_mode": is_empty,
    "truncation_side": is_never,
    "thinking_token_budget": lambda value: value == -1,
    "spaces_between_special_tokens": lambda value: value is True,
    "repetition_detection": is_never,
    "logits_processors": is_empty,
    "vllm_xargs": is_empty,
    "early_stopping": is_empty,
    "guided_whitespace_pattern": is_never,
    "return_prompt_text": is_empty,
}
"""Fields whose effect is not offered here, each with a test for values that do not ask for it. Other unknown fields are
ignored, as by OpenAI's servers and vLLM."""


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether every chunk says how many tokens its choice has so far, as in vLLM; only with `include_usage`."""


class OpenAIRequest(AnswerRequest):
    """One parsed body of /v1/chat/completions or /v1/completions. Clients do not send `is_chat` and `custom_names`."""

    is_chat: bool
    custom_names: frozenset[str] = frozenset()
    """Names of custom tools."""
    best_of: Integer | None = None
    stream_options: StreamOptions = Field(default=StreamOptions(), strict=False)
    return_token_ids: bool = False
    """Whether the reply has the ids of the answer's tokens with their text, and those of the prompt once."""
    return_tokens_as_token_ids: bool = False
    """Whether logprobs name tokens by their ids: `token_id:7`."""
    include_reasoning: bool = True
    """Whether the reply has the part of the answer that is parsed as reasoning."""
    echo: bool = False
    prompt_logprobs: Integer | None = None
    """Top logprobs of each prompt token, in vLLM's form. Those that `echo` shows are counted by `logprobs`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        refuse_unsupported(values)
        return values


def refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Refuses fields whose effect is not offered here: raises UnsupportedFeature that names the first."""
    refuse(values, HARMLESS, "is not supported by this server")


def refuse(values: Mapping[str, Any], harmless: Mapping[str, Callable[[Any], bool]], reason: str) -> None:
    """Refuses fields whose value is not harmless: raises UnsupportedFeature, with this reason, for the first."""
    if harmless.keys().isdisjoint(values):
        return
    for name, is_harmless in harmless.items():
        value = values.get(name)
        if value is not None and not is_harmless(value):
            raise UnsupportedFeature(f"{name} {reason}", field=name)


def top_k_of(body: Mapping[str, Any], *unlimited: int) -> Any:
    """Returns the field's value, and None where it is one of the numbers that mean all tokens."""
    top_k = body.get("top_k")
    return None if top_k in unlimited and not isinstance(top_k, bool) else top_k


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Returns the template variables that say how much a model is to reason."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


class ChatFields(Body):
    messages: list[Any] = Field(description="a list of objects with role and content")
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str = ""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    cache_control: Any = None

    @cached_property
    def given_tools(self) -> ChatTools:
        return read_chat_tools(self.tools, self.tool_choice)

    @property
    def prompt(self) -> ChatPrompt:
        if self.add_special_tokens:
            raise UnsupportedFeature(
                "add_special_tokens is not supported for chats: their template writes the special tokens",
                field="add_special_tokens",
            )
        continues, adds = self.continue_final_message, self.add_generation_prompt
        tools, tool_use = self._offered if self.tools or self.tool_choice is not None else ((), None)
        return ChatPrompt(
            messages=tuple(message_of(entry, f"messages[{index}]") for index, entry in enumerate(self.messages)),
            add_generation_prompt=not continues if adds is None else adds,
            continue_final_message=continues,
            variables={**effort_variables(self.reasoning_effort), **self.chat_template_kwargs},
            tools=tools,
            tool_use=tool_use,
            hints=message_hints(self.messages, self.cache_control),
            template=self.chat_template,
        )

    @property
    def _offered(self) -> tuple[tuple[Mapping[str, Any], ...], ToolUse | None]:
        """The tools that the template shows, and how they may be called."""
        given = self.given_tools
        tools = tools_of(given.functions)
        keeps = keeps_inputs(tools, given.custom_names)
        return tools, tool_use_of(tools, given.choice, self.parallel_tool_calls, keeps_arguments=keeps)


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
    add_special_tokens: bool = True
    split_special_tokens: bool = False
    cache_control: Any = None

    @property
    def keep_s(self) -> float | None:
        return None if self.cache_control is None else hint_s(self.cache_control, "cache_control")


class PromptFields(Body):
    """Fields of a completion that decide what the answer shows of the prompt, and what stands after the answer."""

    echo: bool = False
    suffix: str = ""
    logprobs: Integer | None = None
    prompt_logprobs: Integer | None = None
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The `AnswerOptions` that follow from these fields."""
        wanted = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        counts = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        length: dict[str, Any] = {"is_prompt_only": False}
        if self.echo and wanted == 0:
            length = {"is_prompt_only": True, "max_tokens": 1, "max_completion_tokens": None, "min_tokens": 0}
        return {"prompt_logprobs": max(counts, default=None), **length}


class TokenizeBody(Body):
    model: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds


CHAT_FIELDS: tuple[type[Body], ...] = (OpenAIRequest, ChatFields, ChatLogprobs, AnswerOptions)
COMPLETION_FIELDS: tuple[type[Body], ...] = (OpenAIRequest, TextFields, PromptFields, AnswerOptions)
"""Classes that read the fields of a completion's body."""


def parse_chat(body: Mapping[str, Any]) -> OpenAIRequest:
    logprobs = ChatLogprobs.read(body).most
    for name in ("echo", "suffix"):
        if body.get(name):
            raise UnsupportedFeature(f"{name} is for completions: a chat has no place for it", field=name)
    fields = ChatFields.read(body)
    prompt, custom_names = fields.prompt, fields.given_tools.custom_names if fields.tools else frozenset[str]()
    return _request(body, (prompt,), logprobs, {"is_prompt_only": False}, custom_names, is_chat=True)


def parse_completion(body: Mapping[str, Any]) -> OpenAIRequest:
    if body.get("chat_template"):
        raise UnsupportedFeature("chat_template is for chats: a completion has no template", field="chat_template")
    text, fields = TextFields.read(body), PromptFields.read(body)
    prompts = _prompts(text)
    if fields.echo:
        prompts = tuple(_echoed(prompt) for prompt in prompts)
    if fields.suffix:
        prompts = tuple(_with_suffix(prompt, fields.suffix) for prompt in prompts)
    return _request(body, prompts, body.get("logprobs"), fields.options, is_chat=False)


def tokenize_prompt(body: Mapping[str, Any]) -> TextPrompt | ChatPrompt:
    refuse_unsupported(body)
    if body.get("messages") is not None:
        return ChatFields.read(body).prompt
    text = TextFields.read(body)
    if not isinstance(text.prompt, str):
        raise InvalidRequest("prompt (a string) or messages is needed", field="prompt")
    return _text_prompt(text.prompt, text)


def _request(
    body: Mapping[str, Any],
    prompts: tuple[Prompt, ...],
    logprobs: int | None,
    special: Mapping[str, Any],
    custom_names: frozenset[str] = frozenset(),
    *,
    is_chat: bool,
) -> OpenAIRequest:
    """Reads the fields that chats and completions share. `special` are options that follow from other fields."""
    usual = {
        "max_tokens": body.get("max_tokens") if body.get("max_completion_tokens") is None else None,
        "top_k": top_k_of(body, 0, -1),
        "logprobs": logprobs,
        "structured": None if STRUCTURED.isdisjoint(body) else structured_output(body),
    }
    options = AnswerOptions.read({**body, **usual, **special})
    made = {"is_chat": is_chat, "custom_names": custom_names, "prompts": prompts, "options": options}
    request = OpenAIRequest.read({**body, **made})
    if request.best_of is not None and request.best_of != options.n:
        raise UnsupportedFeature("best_of other than n is not supported by this server", field="best_of")
    if request.prompt_logprobs is not None and request.stream:
        raise UnsupportedFeature("prompt_logprobs are not available when `stream=True`.", field="prompt_logprobs")
    return request


def _echoed(prompt: Prompt) -> Prompt:
    assert not isinstance(prompt, ChatPrompt)
    return dataclasses.replace(prompt, is_echoed=True)


def _with_suffix(prompt: Prompt, suffix: str) -> TextPrompt:
    if not isinstance(prompt, TextPrompt):
        raise InvalidRequest("suffix needs a prompt that is text", field="suffix")
    if prompt.split_special_tokens:
        raise InvalidRequest("suffix needs special tokens: it excludes split_special_tokens", field="suffix")
    return dataclasses.replace(prompt, suffix=suffix)


def _prompts(fields: TextFields) -> tuple[Prompt, ...]:
    value, keep_s = fields.prompt, fields.keep_s
    if isinstance(value, str):
        return (_text_prompt(value, fields),)
    if not isinstance(value, list) or not value:
        raise InvalidRequest("prompt must be a string, a list of strings or token ids, and not empty", field="prompt")
    if is_token_list(value):
        return (_token_prompt(value, keep_s),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt must have at most {MAX_PROMPTS} entries, got {len(value)}", field="prompt")
    if all(isinstance(entry, str) for entry in value):
        return tuple(_text_prompt(entry, fields) for entry in value)
    if all(is_token_list(entry) for entry in value):
        return tuple(_token_prompt(entry, keep_s) for entry in value)
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists", field="prompt"
    )


def _text_prompt(text: str, fields: TextFields) -> TextPrompt:
    return TextPrompt(text, fields.split_special_tokens, fields.keep_s, add_special_tokens=fields.add_special_tokens)


def _token_prompt(ids: list[int], keep_s: float | None) -> TokenPrompt:
    return TokenPrompt(ids, hints=() if keep_s is None else (TokenHint(len(ids), keep_s),))
