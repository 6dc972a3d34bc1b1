"""Messages of the gRPC API, turned into the router's own types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.frontend.params import AnswerOptions, ChatPrompt, Prompt, TextPrompt, TokenPrompt, check_role
from twostroke.errors import InvalidRequest
from twostroke.rpc.v1 import inference_pb2


def prompt_of(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "chat":
        return ChatPrompt(
            messages=tuple(
                {"role": check_role(entry.role, f"messages[{rank}].role"), "content": entry.content}
                for rank, entry in enumerate(request.chat.messages)
            ),
            add_generation_prompt=not request.chat.continue_final_message,
            continue_final_message=request.chat.continue_final_message,
        )
    if isinstance(request, inference_pb2.GenerateRequest) and kind == "token_ids":
        return TokenPrompt(request.token_ids.ids)
    raise InvalidRequest("prompt is needed: text, token_ids or chat", field="prompt")


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
