"""Messages of the gRPC API, turned into the router's own types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from router.dialects.openai.schema import ChatFields
from router.json_body import parse_json_text
from router.requests.client_request import AnswerRequest
from router.requests.params import AnswerOptions, check_request_id
from router.text.cache_hints import MOST_HINTS, USUAL_S, MessageHint, TokenHint, checked_s
from router.text.output.events import TextEvent
from router.text.output.parts import ReasoningPart, TextPart, ToolCallPart
from router.text.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.text.structured.fields import any_object, choice_of, schema_text
from router.text.structured.output import StructuredOutput
from twostroke.base.errors import InvalidRequest
from twostroke.rpc.v1 import inference_pb2, pins_pb2

SIGNED_SEEDS = 2**63
"""Seeds from this one on have no place in a signed number: other dialects write the same 64 bits as a negative seed."""


class GenerateBody(AnswerRequest):
    """One parsed message of `Generate`."""

    request_id: str = ""
    resume_from: str = ""
    tenant: str = ""

    @property
    def named_tenant(self) -> str:
        return self.tenant


_FIELDS = frozenset(field.alias or name for name, field in GenerateBody.model_fields.items())
"""Names of the fields of `GenerateBody`. Fields of a message with these names are passed on as they were sent."""


def parse_generate(message: inference_pb2.GenerateRequest) -> GenerateBody:
    """Reads a message. Raises InvalidRequest that names the field."""
    made = {"prompts": (prompt_of(message),), "options": options_of(message)}
    check_request_id(message.request_id, "request_id")
    check_request_id(message.tenant, "tenant")
    given = {field.name: value for field, value in message.ListFields() if field.name in _FIELDS}
    return GenerateBody.read({**given, "priority": -message.priority, **made})  # in this API, higher goes first


def prompt_of(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    keep_s = _keep_s(request, "cache_control") if isinstance(request, inference_pb2.GenerateRequest) else None
    suffix = request.suffix if isinstance(request, inference_pb2.GenerateRequest) else ""
    if kind == "text":
        return TextPrompt(request.text, keep_s=keep_s, suffix=suffix)
    if suffix:
        raise InvalidRequest("suffix needs a prompt that is text", field="suffix")
    if kind == "chat":
        return dataclasses.replace(_chat_of(request.chat), hints=_hints_of(request.chat, keep_s))
    if isinstance(request, inference_pb2.GenerateRequest) and kind == "token_ids":
        ids = request.token_ids.ids
        return TokenPrompt(ids, hints=() if keep_s is None else (TokenHint(len(ids), keep_s),))
    raise InvalidRequest("prompt is needed: text, token_ids or chat", field="prompt")


def parse_prefix(body: bytes) -> Prompt:
    """Returns the prefix of a serialized AddPinRequest."""
    request = pins_pb2.AddPinRequest.FromString(body)
    match request.WhichOneof("prefix"):
        case "text":
            return TextPrompt(request.text)
        case "chat":
            return _chat_of(request.chat)
        case "token_ids":
            return TokenPrompt(request.token_ids.ids)
        case _:
            raise InvalidRequest("a prefix is needed: text, token_ids or chat", field="prefix")


def _chat_of(chat: inference_pb2.Chat) -> ChatPrompt:
    """Returns the chat as the OpenAI API would read it."""
    return ChatFields.read(
        {
            **_given(chat, ("add_generation_prompt", "parallel_tool_calls")),
            "messages": list(map(_message_of, chat.messages)),
            "continue_final_message": chat.continue_final_message,
            "chat_template_kwargs": _json_of(chat.chat_template_kwargs, "chat_template_kwargs"),
            "tools": _json_of(chat.tools, "tools"),
            "tool_choice": _tool_choice(chat.tool_choice),
        }
    ).prompt


def _message_of(entry: inference_pb2.ChatMessage) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in entry.tool_calls
    ]
    named = {"name": entry.name, "tool_call_id": entry.tool_call_id, "reasoning_content": entry.reasoning}
    given = {name: value for name, value in named.items() if value}
    return {"role": entry.role, "content": entry.content, **({"tool_calls": calls} if calls else {}), **given}


def _tool_choice(value: str) -> Any:
    return _json_of(value, "tool_choice") if value.startswith("{") else value or None


def _json_of(value: str, field: str) -> Any:
    """Returns the value of a JSON text. None: it is empty."""
    return parse_json_text(value, field) if value else None


def _hints_of(chat: inference_pb2.Chat, whole_s: float | None) -> tuple[MessageHint, ...]:
    hints = [
        MessageHint(index + 1, seconds)
        for index, entry in enumerate(chat.messages)
        if (seconds := _keep_s(entry, f"messages[{index}].cache_control")) is not None
    ]
    if whole_s is not None:
        hints.append(MessageHint(len(chat.messages), whole_s))
    return tuple(hints[-MOST_HINTS:])


def _keep_s(message: inference_pb2.GenerateRequest | inference_pb2.ChatMessage, name: str) -> float | None:
    if not message.HasField("cache_control"):
        return None
    return checked_s(message.cache_control.ttl_s or USUAL_S, f"{name}.ttl_s")


def add_output(message: inference_pb2.GenerateResponse, event: TextEvent) -> None:
    """Adds an event's text, reasoning and tool calls. All pieces of one call become one entry of the message."""
    if event.parts is None:
        message.text = event.text
        return
    calls: dict[int, inference_pb2.ToolCallPiece] = {}
    for part in event.parts:
        match part:
            case TextPart(text):
                message.text += text
            case ReasoningPart(text):
                message.reasoning += text
            case ToolCallPart(index, call_id, name, arguments):
                if index not in calls:
                    calls[index] = message.tool_calls.add(index=index)
                if name:
                    calls[index].id, calls[index].name = call_id, name
                calls[index].arguments += arguments


def options_of(request: inference_pb2.GenerateRequest) -> AnswerOptions:
    sampling, stop = request.sampling, request.stop
    options: dict[str, Any] = _given(
        sampling,
        (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logprobs",
            "prompt_logprobs",
        ),
    )
    if options.get("seed", 0) >= SIGNED_SEEDS:
        options["seed"] -= 2 * SIGNED_SEEDS  # the same 64 bits, as other dialects write them
    options |= _given(stop, ("max_tokens", "min_tokens")) | _given(request, ("n", "skip_special_tokens"))
    if options.get("top_k") == 0:
        del options["top_k"]
    options |= {
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "logprob_token_ids": list(sampling.logprob_token_ids),
        "stop": list(stop.stop),
        "stop_token_ids": list(stop.stop_token_ids),
        "ignore_eos": stop.ignore_eos,
        "include_stop_str_in_output": stop.include_stop_str_in_output,
    }
    if request.HasField("structured_output"):
        options["structured"] = _structured_of(request.structured_output)
    return AnswerOptions.read(options)


def _structured_of(wanted: inference_pb2.StructuredOutput) -> StructuredOutput | None:
    kind = wanted.WhichOneof("kind")
    field = f"structured_output.{kind}"
    has_whitespace = not wanted.no_whitespace
    match kind:
        case "json_schema":
            schema = schema_text(wanted.json_schema, field)
            return StructuredOutput("json", schema.encode(), field, wanted.strict, has_whitespace)
        case "json_object":
            return any_object(field, has_whitespace=has_whitespace) if wanted.json_object else None
        case "choice":
            return choice_of(list(wanted.choice.strings), field)
        case "regex" | "grammar":
            return StructuredOutput(kind, getattr(wanted, kind).encode(), field)
        case _:
            raise InvalidRequest(
                "structured_output must have one of json_schema, json_object, regex, choice, grammar",
                field="structured_output",
            )


def _given(message: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns the optional fields that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}
