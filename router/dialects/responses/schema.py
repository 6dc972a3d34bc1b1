"""Bodies of /v1/responses and its input_tokens, checked and turned into the router's own types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from router.dialects.openai.chat_messages import tool_use_of, tools_of
from router.dialects.openai.custom_tools import keeps_inputs
from router.dialects.openai.schema import effort_variables, is_empty, is_never, refuse_unsupported, top_k_of
from router.dialects.responses.items import messages_of
from router.dialects.responses.tools import ResponseTools, read_tools
from router.json_body import Body, Integer, wrong_kind
from router.requests.client_request import AnswerRequest
from router.requests.params import AnswerOptions
from router.text.prompts import ChatPrompt
from router.text.structured.fields import structured_text
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest, UnsupportedFeature
from twostroke.request import MAX_LOGPROBS, MOST_TOKENS

LOGPROBS_INCLUDED = "message.output_text.logprobs"
REASONING_INCLUDED = "reasoning.encrypted_content"


class RefusedField(NamedTuple):
    """A field whose effect is not offered here."""

    is_harmless: Callable[[Any], bool]
    """Returns whether a value does not ask for the effect."""
    why: str = "this server does not support it"


_NO_STORE = "this server stores no responses: send the whole conversation as input"

REFUSED: Mapping[str, RefusedField] = {
    "previous_response_id": RefusedField(is_never, _NO_STORE),
    "conversation": RefusedField(is_never, _NO_STORE),
    "prompt": RefusedField(is_never, "this server stores no prompts: send instructions and input"),
    "background": RefusedField(is_empty, "this server stores no responses that could be asked for later"),
    "moderation": RefusedField(is_empty),
    "n": RefusedField(lambda value: value == 1, "a response has one answer"),
    "response_format": RefusedField(is_never, "the format of the text is text.format here"),
    "messages": RefusedField(is_never, "the conversation is input here"),
    "echo": RefusedField(is_empty),
    "suffix": RefusedField(is_empty),
    "prompt_logprobs": RefusedField(is_never),
    "max_tokens": RefusedField(is_never, "the limit is max_output_tokens here"),
    "max_completion_tokens": RefusedField(is_never, "the limit is max_output_tokens here"),
    "return_token_ids": RefusedField(is_empty),
    "return_tokens_as_token_ids": RefusedField(is_empty),
    "include_reasoning": RefusedField(lambda value: value is True),
    "add_special_tokens": RefusedField(is_empty, "the chat template writes the special tokens"),
    "enable_response_messages": RefusedField(is_empty),
    "previous_input_messages": RefusedField(is_empty, _NO_STORE),
}
"""Fields that are refused, because ignoring them would change the answer. Null and other unknown fields are ignored."""


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
    "allowed_token_ids",
    "logprob_token_ids",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
"""Fields of sampling and stopping. They mean the same as in chat completions."""


VERBOSITIES = ("low", "medium", "high")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SUMMARIES = ("auto", "concise", "detailed")

UNNAMED_SCHEMA = "response"
"""Name in the response of a schema that the client has not named: clients cannot read a format without a name."""

MAX_SAFETY_IDENTIFIER_CHARS = 64
"""OpenAI's own limit: responses repeat the identifier."""


def _one_of(values: tuple[str, ...], field: str, instead: str = "") -> AfterValidator:
    """Returns a validator that accepts only these values. A response repeats the field, and its clients
    know no others.
    """

    def check(value: str | None) -> str | None:
        if value is not None and value not in values:
            wanted = f"{field} must be one of {', '.join(values)}, got {shown(value)}{instead}"
            raise InvalidRequest(wanted, field=field)
        return value

    return AfterValidator(check)


def _described(form: dict[str, Any]) -> dict[str, Any]:
    for name in ("name", "description"):
        if not isinstance(form.get(name), str | None):
            raise wrong_kind(f"text.format.{name}", form[name], "a string")
    return form


class TextField(Body):
    format: Annotated[dict[str, Any], AfterValidator(_described)] = Field(default_factory=lambda: {"type": "text"})
    verbosity: Annotated[str | None, _one_of(VERBOSITIES, "text.verbosity")] = None

    @property
    def shown(self) -> Mapping[str, Any]:
        """The field as a response shows it: complete, and without keys that the API does not have."""
        verbosity = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return {"format": _shown_format(self.format), **verbosity}


def _shown_format(form: Mapping[str, Any]) -> Mapping[str, Any]:
    if form.get("type") != "json_schema":
        return {"type": form["type"]}
    schema, description = form["schema"], form.get("description")
    return {
        "type": "json_schema",
        "name": form.get("name") or UNNAMED_SCHEMA,
        **({} if description is None else {"description": description}),
        "schema": json.loads(schema) if isinstance(schema, str) else schema,
        "strict": bool(form.get("strict")),
    }


class ReasoningField(Body):
    effort: Annotated[
        str | None,
        _one_of(EFFORTS, "reasoning.effort", ": words of a template's own go into chat_template_kwargs"),
    ] = None
    summary: Annotated[str | None, _one_of(SUMMARIES, "reasoning.summary")] = None


def _safety_identifier(value: str | None) -> str | None:
    if value is not None and len(value) > MAX_SAFETY_IDENTIFIER_CHARS:
        wanted = f"safety_identifier must have at most {MAX_SAFETY_IDENTIFIER_CHARS} characters, got {len(value)}"
        raise InvalidRequest(wanted, field="safety_identifier")
    return value


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
    metadata: dict[str, str] = Field(default_factory=dict)
    top_logprobs: Integer = 0
    safety_identifier: Annotated[str | None, AfterValidator(_safety_identifier)] = None

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
        """Whether the client sends reasoning back as `encrypted_content`."""
        return REASONING_INCLUDED in self.include


class ResponsesFields(Body):
    input: Any = None
    instructions: str | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningField = Field(default=ReasoningField(), strict=False)
    chat_template: str = ""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def prompt(self, tools: ResponseTools) -> ChatPrompt:
        functions = tools_of(tools.chat_tools)
        return ChatPrompt(
            messages=messages_of(self.input, self.instructions),
            variables={**effort_variables(self.reasoning.effort), **self.chat_template_kwargs},
            tools=functions,
            tool_use=tool_use_of(
                functions,
                tools.chat_choice,
                self.parallel_tool_calls,
                keeps_arguments=keeps_inputs(functions, tools.custom_names),
            ),
            template=self.chat_template,
        )


FIELDS: tuple[type[Body], ...] = (ResponsesRequest, ResponsesFields, AnswerOptions)
"""Classes that read the fields of a body. `AnswerOptions` reads only those in `SAMPLING`."""


def parse_response(body: Mapping[str, Any]) -> ResponsesRequest:
    fields = ResponsesFields.read(body)
    tools = read_tools(fields.tools, fields.tool_choice)
    further = {"prompts": (), "options": AnswerOptions(), "given_tools": tools}
    request = ResponsesRequest.read({**body, **further})
    return request.model_copy(update={"prompts": (fields.prompt(tools),), "options": _options(body, request)})


def counted_response(body: Mapping[str, Any]) -> ChatPrompt:
    """Returns the chat of a body of /v1/responses/input_tokens, which asks for no answer."""
    _refuse(body)
    fields = ResponsesFields.read(body)
    return fields.prompt(read_tools(fields.tools, fields.tool_choice))


def _refuse(body: Mapping[str, Any]) -> None:
    """Refuses fields that would change the answer if they were ignored: raises UnsupportedFeature for the first."""
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
    special = {
        "top_k": top_k_of(body, 0, -1),
        "max_completion_tokens": most,
        "logprobs": top if request.has_logprobs else None,
        "structured": structured_text(request.text.format, body),
    }
    return AnswerOptions.read({**{name: body.get(name) for name in SAMPLING}, **special})
