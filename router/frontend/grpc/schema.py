"""Messages of the gRPC API, turned into the router's own types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from router.frontend.params import AnswerOptions, ChatPrompt, Prompt, TextPrompt, TokenPrompt, check_role
from twostroke.errors import InvalidRequest
from twostroke.rpc.v1 import inference_pb2, pins_pb2


def prompt_of(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "chat":
        return _chat_of(request.chat)
    if isinstance(request, inference_pb2.GenerateRequest) and kind == "token_ids":
        return TokenPrompt(request.token_ids.ids)
    raise InvalidRequest("prompt is needed: text, token_ids or chat", field="prompt")


def prefix_of(request: pins_pb2.AddPinRequest) -> Prompt:
    match request.WhichOneof("prefix"):
        case "text":
            return TextPrompt(request.text)
        case "chat":
            return _chat_of(request.chat)
        case "token_ids":
            return TokenPrompt(request.token_ids.ids)
        case _:
            raise InvalidRequest("a prefix is needed: text, token_ids or chat", field="prefix")


def continuations_of(chat: ChatPrompt) -> tuple[ChatPrompt, ChatPrompt]:
    """Returns two chats that go on differently after these messages: templates may render a message by what follows."""
    if chat.continue_final_message:
        raise InvalidRequest("continue_final_message has no effect on a pin", field="chat.continue_final_message")
    role = "assistant" if chat.messages[-1]["role"] == "user" else "user"
    first, second = (
        dataclasses.replace(chat, messages=(*chat.messages, {"role": role, "content": content}))
        for content in ("A", "7")
    )
    return first, second


def _chat_of(chat: inference_pb2.Chat) -> ChatPrompt:
    return ChatPrompt(
        messages=tuple(
            {"role": check_role(entry.role, f"messages[{rank}].role"), "content": entry.content}
            for rank, entry in enumerate(chat.messages)
        ),
        add_generation_prompt=not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
    )


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
        ),
    )
    options |= _given(stop, ("max_tokens", "min_tokens")) | _given(request, ("n",))
    if options.get("top_k") == 0:
        del options["top_k"]
    options |= {
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "stop": list(stop.stop),
        "stop_token_ids": list(stop.stop_token_ids),
        "ignore_eos": stop.ignore_eos,
        "include_stop_str_in_output": stop.include_stop_str_in_output,
    }
    return AnswerOptions.read(options)


def _given(message: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns the optional fields that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}
