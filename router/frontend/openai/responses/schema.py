"""Bodies of /v1/responses and its input_tokens, checked and turned into the router's own types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from router.frontend.answer_request import AnswerRequest
from router.frontend.json_body import Body, Integer
from router.frontend.openai.chat_messages import tool_use_of, tools_of
from router.frontend.openai.responses.items import messages_of
from router.frontend.openai.responses.tools import ResponseTools, read_tools
from router.frontend.openai.schema import refuse_unsupported
from router.frontend.params import AnswerOptions, ChatPrompt
from router.frontend.structured.fields import structured_text
from twostroke.errors import InvalidRequest, UnsupportedFeature
from twostroke.request import MAX_LOGPROBS, MOST_TOKENS

LOGPROBS_INCLUDED = "message.output_text.logprobs"
REASONING_INCLUDED = "reasoning.encrypted_content"


class Refused(NamedTuple):
    """A field whose effect is not offered here."""

    is_harmless: Callable[[Any], bool]
    """Tells whether a value asks for no effect."""
    why: str = "this server does not support it"


def _is_empty(value: Any) -> bool:
    return not value


def _is_never(value: Any) -> bool:
    return False


_NO_STORE = "this server stores no responses: send the whole conversation as input"

REFUSED: Mapping[str, Refused] = {
    "previous_response_id": Refused(_is_never, _NO_STORE),
    "conversation": Refused(_is_never, _NO_STORE),
    "prompt": Refused(_is_never, "this server stores no prompts: send instructions and input"),
    "background": Refused(_is_empty, "this server stores no responses that could be asked for later"),
    "moderation": Refused(_is_empty),
    "n": Refused(lambda value: value == 1, "a response has one answer"),
    "response_format": Refused(_is_never, "the format of the text is text.format here"),
    "messages": Refused(_is_never, "the conversation is input here"),
    "echo": Refused(_is_empty),
    "suffix": Refused(_is_empty),
    "prompt_logprobs": Refused(_is_never),
    "max_tokens": Refused(_is_never, "the limit is max_output_tokens here"),
    "max_completion_tokens": Refused(_is_never, "the limit is max_output_tokens here"),
}
"""Fields that would change the answer if they were ignored, apart from null. Other unknown fields are ignored."""


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
"""Fields of sampling and stopping that are those of chat completions."""


class TextField(Body):
    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    verbosity: str | None = None


class ReasoningField(Body):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(AnswerRequest):
    """One parsed body of /v1/responses. Clients do not send `given_tools`."""

    given_tools: ResponseTools
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    parallel_tool_calls: bool = True
    text: TextField = Field(default=TextField(), strict=False)
    reasoning: ReasoningField = Field(default=ReasoningField(), strict=False)
    include: list[Any] = Field(default_factory=list)
    store: bool = False
    """Whether the client wants the response stored; nothing is."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    top_logprobs: Integer = 0
    safety_identifier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        _refuse(values)
        return values

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS_INCLUDED in self.include

    @property
    def encodes_reasoning(self) -> bool:
        """The client sends reasoning back as `encrypted_content`."""
        return REASONING_INCLUDED in self.include


class ChatFields(Body):
    input: Any = None
    instructions: str | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningField = Field(default=ReasoningField(), strict=False)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def prompt(self, tools: ResponseTools) -> ChatPrompt:
        shown = tools_of(tools.chat_tools)
        return ChatPrompt(
            messages=messages_of(self.input, self.instructions),
            variables={**_variables(self.reasoning.effort), **self.chat_template_kwargs},
            tools=shown,
            tool_use=tool_use_of(shown, tools.chat_choice, self.parallel_tool_calls),
        )


def parse_response(body: Mapping[str, Any]) -> ResponsesRequest:
    fields = ChatFields.read(body)
    tools = read_tools(fields.tools, fields.tool_choice)
    further = {"prompts": (), "options": AnswerOptions(), "given_tools": tools}
    request = ResponsesRequest.read({**body, **further})
    return request.model_copy(update={"prompts": (fields.prompt(tools),), "options": _options(body, request)})


def counted_response(body: Mapping[str, Any]) -> ChatPrompt:
    """Returns the chat of a body of /v1/responses/input_tokens, which asks for no answer."""
    _refuse(body)
    fields = ChatFields.read(body)
    return fields.prompt(read_tools(fields.tools, fields.tool_choice))


def _refuse(body: Mapping[str, Any]) -> None:
    """Raises UnsupportedFeature for a field that would change the answer if it was ignored."""
    for name, refused in REFUSED.items():
        value = body.get(name)
        if value is not None and not refused.is_harmless(value):
            raise UnsupportedFeature(f"{name} is not supported: {refused.why}", field=name)
    refuse_unsupported(body)


def _options(body: Mapping[str, Any], request: ResponsesRequest) -> AnswerOptions:
    most, top = request.max_output_tokens, request.top_logprobs
    if most is not None and most < 1:
        raise InvalidRequest(
            f"max_output_tokens must be from 1 to {MOST_TOKENS}, got {most}", field="max_output_tokens"
        )
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {top}", field="top_logprobs")
    top_k = body.get("top_k")
    special = {
        "top_k": None if top_k in (0, -1) and not isinstance(top_k, bool) else top_k,
        "max_completion_tokens": most,
        "logprobs": top if request.has_logprobs else None,
        "structured": structured_text(request.text.format, body),
    }
    return AnswerOptions.read({**{name: body.get(name) for name in SAMPLING}, **special})


def _variables(effort: str | None) -> dict[str, Any]:
    """Returns the names by which templates know how much a model is to reason."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
