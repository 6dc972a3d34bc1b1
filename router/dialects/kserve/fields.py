"""Inputs and parameters of KServe's protocol, by name: how each is checked, and read if it comes as text.

Clients write numbers as text: parameters of Triton's requests are scalars, and its vLLM backend takes the values of
`sampling_parameters` as strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from router.dialects.openai.schema import HARMLESS
from router.json_body import parse_json_text, wrong_kind
from router.requests.client_request import AnswerRequest
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest, UnsupportedFeature

MOST_NUMBER_CHARS = 400
"""Most characters of a number that comes as text. The longest float has some hundred; Python is slow with thousands."""

_FLAGS: Mapping[Any, bool] = {"true": True, "false": False, "1": True, "0": False}

Read = Callable[[str, Any], Any]
"""Returns a field's value, given its name and what the client sent. Raises InvalidRequest."""


def integer(name: str, value: Any) -> Any:
    return _number(name, value, int, "an integer")


def number(name: str, value: Any) -> Any:
    return _number(name, value, float, "a finite number")


def flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = _FLAGS.get(str(value).lower()) if isinstance(value, str | int) else None
    if known is None:
        raise wrong_kind(name, value, "true or false")
    return known


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_kind(name, value, "a string")
    return value


def json_list(name: str, value: Any) -> Any:
    """Returns a list, which may come as its JSON text."""
    return _json(name, value)


def json_object(name: str, value: Any) -> Any:
    """Returns an object, which may come as its JSON text."""
    read = _json(name, value)
    if not isinstance(read, dict):
        raise wrong_kind(name, read, "an object")
    return read


def as_sent(name: str, value: Any) -> Any:
    return value


OPTIONS: Mapping[str, Read] = {
    "n": integer,
    "max_tokens": integer,
    "min_tokens": integer,
    "temperature": number,
    "top_k": integer,
    "top_p": number,
    "min_p": number,
    "presence_penalty": number,
    "frequency_penalty": number,
    "repetition_penalty": number,
    "logit_bias": json_object,
    "allowed_token_ids": json_list,
    "logprobs": integer,
    "logprob_token_ids": json_list,
    "seed": integer,
    "stop": as_sent,
    "stop_token_ids": json_list,
    "ignore_eos": flag,
    "include_stop_str_in_output": flag,
    "skip_special_tokens": flag,
}
"""Sampling parameters: fields of AnswerOptions."""

ASKED_OUTPUTS: Mapping[str, str] = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
"""Flags of Triton's vLLM backend, and the outputs that they ask for."""

OF_REQUEST = frozenset(field.alias or name for name, field in AnswerRequest.model_fields.items()) - {
    *("model", "options", "prompt_cache_key", "prompts", "stream", "timeout")
}
"""Fields that AnswerRequest reads under the same names."""

OTHERS: Mapping[str, Read] = {
    **dict.fromkeys(ASKED_OUTPUTS, flag),
    "text_input": text,
    "streaming": flag,
    "stream": flag,
    "exclude_input_in_output": flag,
    "details": flag,
    "triton_enable_empty_final_response": flag,
    "timeout": integer,
    **dict.fromkeys(OF_REQUEST, as_sent),
    "priority": integer,
    "response_format": json_object,
    "structured_outputs": json_object,
    "guided_decoding": json_object,
}
"""Fields that are not sampling parameters."""


def _is_default(*values: Any) -> Callable[[Any], bool]:
    """Returns a test whether a value is one of `values`, or the text of one."""
    known = frozenset(str(value).lower() for value in values)
    return lambda value: str(value).lower() in known


_HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    "best_of": _is_default(1),
    "use_beam_search": _is_default(False),
    "length_penalty": _is_default(1, 1.0),
    "early_stopping": _is_default(False),
    "prompt_logprobs": _is_default(),
    "truncate_prompt_tokens": _is_default(),
    "bad_words": _is_default([]),
    "add_special_tokens": _is_default(True),
    "include_reasoning": _is_default(True),
    "return_token_ids": _is_default(False),
    "return_tokens_as_token_ids": _is_default(False),
    "logits_processors": _is_default([]),
    "guided_json": _is_default(),
    "guided_regex": _is_default(),
    "guided_choice": _is_default(),
    "guided_grammar": _is_default(),
    "spaces_between_special_tokens": _is_default(True),
    "detokenize": _is_default(True),
    "lora_name": _is_default(""),
    "tools": _is_default([]),
    "tool_choice": _is_default("none", "auto"),
    "echo": _is_default(False),
    "suffix": _is_default(""),
    "json_schema": _is_default(""),
    "chat_template": _is_default(""),
    "max_new_tokens": _is_default(),
    "stop_words": _is_default([]),
    "beam_width": _is_default(1),
    "no_repeat_ngram_size": _is_default(0),
    "image": _is_default(),
    "messages": _is_default(),
    "chat_template_kwargs": _is_default(),
    "enable_thinking": _is_default(False),
    "return_reasoning": _is_default(False),
    "sequence_id": _is_default(0, ""),
    "sequence_start": _is_default(False),
    "sequence_end": _is_default(False),
}
"""Fields whose effect is not offered here, each with a test for values that do not ask for it. Further ones, which no
dialect offers, are in `HARMLESS` of OpenAI's API."""

_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "use structured_outputs"),
    "lora_name": "name the adapter as the model",
    "messages": "chats are served at /v1/chat/completions",
    "image": "the model takes text",
}


def read_field(name: str, value: Any, *, may_be_unknown: bool) -> Any:
    """Returns a field's value. Raises InvalidRequest that names it where it is wrong, unknown or not offered."""
    read = OPTIONS.get(name) or OTHERS.get(name)
    if read is not None:
        return read(name, value)
    is_harmless = _HARMLESS.get(name) or HARMLESS.get(name)
    if is_harmless is None and not may_be_unknown:
        raise InvalidRequest(
            f"{shown(name)} is neither an input nor a sampling parameter of this server", field=name[:100]
        )
    if is_harmless is not None and not is_harmless(value):
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise UnsupportedFeature(f"{name} is not supported by this server{instead}", field=name)
    return None


def _number(name: str, value: Any, kind: type[int] | type[float], wanted: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        if len(value) <= MOST_NUMBER_CHARS:
            return kind(value)
    except ValueError:
        pass
    raise InvalidRequest(f"{name} must be {wanted}, got {shown(value)}", field=name)


def _json(name: str, value: Any) -> Any:
    return parse_json_text(value, name) if isinstance(value, str) else value
