"""Bodies of /v1/messages and its count_tokens, checked and turned into the router's own types."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from router.dialects.anthropic.conversation import ConversationBuilder
from router.dialects.openai.chat_messages import checked_tools, tool_use_of, tools_of
from router.dialects.openai.schema import is_empty, is_never, refuse, refuse_unsupported, top_k_of
from router.json_body import Body, Integer, Strings, wrong_kind
from router.requests.client_request import AnswerRequest
from router.requests.params import MAX_REQUEST_ID_CHARS, MAX_STOP_CHARS, MAX_STOP_STRINGS, AnswerOptions
from router.text.prompts import ChatPrompt
from router.text.structured.fields import opened, structured_output
from router.text.structured.output import StructuredOutput
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest, UnsupportedFeature

_HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    "container": is_never,
    "mcp_servers": is_empty,
    "response_format": is_never,
    "return_token_ids": is_empty,
    "return_tokens_as_token_ids": is_empty,
    "include_reasoning": lambda value: value is True,
    "add_special_tokens": is_empty,
}
"""Fields whose effect is not offered here, each with a test for values that do not ask for it. Other unknown fields are
ignored."""

_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
"""The `tool_choice` of OpenAI's API by the type that Anthropic's API has for it."""

_THINKS: Mapping[str, bool] = {"enabled": True, "adaptive": True, "disabled": False}
_THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Names by which published chat templates ask whether the model is to think."""

OTHER_OPTIONS = (
    *("n", "max_completion_tokens", "include_stop_str_in_output"),
    *("logprobs", "logprob_token_ids", "prompt_logprobs"),
)
"""Options of other dialects that messages of this one cannot answer. They are ignored, as all unknown fields are."""


class _MessagesFields(Body):
    messages: list[Any] = Field(description="a list of objects with role and content")
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    cache_control: Any = None
    chat_template: str = ""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def prompt(self, chat: ConversationBuilder) -> ChatPrompt:
        """Returns the prompt. Adds the system prompt, all messages and all cache hints to `chat`."""
        if not self.messages:
            raise InvalidRequest("messages must not be empty", field="messages")
        tools = tools_of(openai_tools(self.tools))
        if self.system is not None:
            chat.add_system(self.system, "system")
        for tool in self.tools or ():
            if tool.get("cache_control") is not None:  # templates write tools into the system prompt
                chat.keep(tool["cache_control"], len(chat.messages), "tools.cache_control")
        for index, message in enumerate(self.messages):
            chat.add(message, f"messages[{index}]")
        if self.cache_control is not None:
            chat.keep(self.cache_control, len(chat.messages), "cache_control")
        return ChatPrompt(
            messages=tuple(chat.messages),
            add_generation_prompt=not chat.goes_on,
            continue_final_message=chat.goes_on,
            variables={**self._thinking_variables(), **self.chat_template_kwargs},
            tools=tools,
            tool_use=tool_use_of(tools, openai_choice(self.tool_choice), is_parallel(self.tool_choice)),
            hints=chat.hints,
            template=self.chat_template,
        )

    def _thinking_variables(self) -> Mapping[str, bool]:
        if self.thinking is None:
            return {}
        kind = self.thinking.get("type")
        if not isinstance(kind, str) or kind not in _THINKS:
            raise InvalidRequest(f"thinking.type must be one of {', '.join(_THINKS)}", field="thinking.type")
        return dict.fromkeys(_THINKING_VARIABLES, _THINKS[kind])

    @property
    def user(self) -> str:
        """The user's id, or its digest if the id is too long or not printable."""
        user = None if self.metadata is None else self.metadata.get("user_id")
        if user is None:
            return ""
        if not isinstance(user, str):
            raise InvalidRequest("metadata.user_id must be a string", field="metadata.user_id")
        is_short = len(user) <= MAX_REQUEST_ID_CHARS and user.isprintable()
        return user if is_short else hashlib.sha256(user.encode()).hexdigest()


class _Limits(Body):
    max_tokens: Integer
    stop_sequences: Strings = ()

    @property
    def stop(self) -> list[str]:
        stops = self.stop_sequences
        if len(stops) > MAX_STOP_STRINGS or any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            wanted = f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters"
            raise InvalidRequest(f"stop_sequences must be {wanted}", field="stop_sequences")
        return list(stops)

    @property
    def length(self) -> Mapping[str, Any]:
        """Returns options of the answer. With `max_tokens` 0 the client only wants its prompt in the cache."""
        if self.max_tokens == 0:
            return {"is_prompt_only": True, "max_tokens": 1, "min_tokens": 0}
        return {"is_prompt_only": False}


class MessagesRequest(AnswerRequest):
    """One parsed body of /v1/messages. Clients do not send `had_billing_header`."""

    had_billing_header: bool

    @property
    def removed_part(self) -> str:
        return "billing_header" if self.had_billing_header else ""


FIELDS: tuple[type[Body], ...] = (MessagesRequest, _MessagesFields, _Limits, AnswerOptions)
"""Classes that read the fields of a body. `AnswerOptions` does not read those in `OTHER_OPTIONS`."""


def parse_messages(body: Mapping[str, Any]) -> MessagesRequest:
    _refuse_unsupported(body)
    fields, chat = _MessagesFields.read(body), ConversationBuilder()
    prompts = (fields.prompt(chat),)
    limits = _Limits.read(body)
    own = {"top_k": top_k_of(body, 0), "stop": limits.stop, "structured": _output_format(body), **limits.length}
    options = AnswerOptions.read({**body, **dict.fromkeys(OTHER_OPTIONS), **own})
    made = {"prompts": prompts, "options": options, "had_billing_header": chat.had_billing_header}
    return MessagesRequest.read({**body, "user": fields.user, **made})


def counted_chat(body: Mapping[str, Any]) -> ChatPrompt:
    """Returns the chat of a body of count_tokens, which has no `max_tokens`."""
    _refuse_unsupported(body)
    return _MessagesFields.read(body).prompt(ConversationBuilder())


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    refuse_unsupported(body)
    refuse(body, _HARMLESS, "is not supported in this API by this server")


def _output_format(body: Mapping[str, Any]) -> StructuredOutput | None:
    """Returns what the text of an answer must match; None: any text. Raises InvalidRequest, naming the field.

    `output_format` is an older name of `output_config.format`. vLLM's `structured_outputs` may stand in a body, too.
    """
    config = body.get("output_config")
    if not isinstance(config, Mapping | None):
        raise wrong_kind("output_config", config, "an object")
    named = {"output_config.format": (config or {}).get("format"), "output_format": body.get("output_format")}
    formats = [_schema_of(form, name) for name, form in named.items() if form is not None]
    others = structured_output({**body, "response_format": None})
    given = [*formats, *([] if others is None else [others])]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0].field} and {given[1].field} exclude each other", field=given[1].field)
    return opened(given[0] if given else None, body.get("structured_outputs"))


def _schema_of(form: Any, name: str) -> StructuredOutput:
    if not isinstance(form, Mapping):
        raise wrong_kind(name, form, "an object")
    if form.get("type") != "json_schema":
        raise UnsupportedFeature(f"{name}.type must be json_schema, got {shown(str(form.get('type')))}", field=name)
    schema = form.get("schema")
    if not isinstance(schema, Mapping):
        raise wrong_kind(f"{name}.schema", schema, "an object")
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return StructuredOutput("json", text.encode(), f"{name}.schema", is_strict=True)


def openai_tools(tools: Any) -> list[dict[str, Any]]:
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(checked_tools(tools))]


def openai_choice(choice: Any) -> str | dict[str, Any] | None:
    """Returns the `tool_choice` in the form of OpenAI's API. None: the client sent none."""
    if choice is None:
        return None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if kind in ("function", "custom", "allowed_tools") or choice in ("auto", "required", "none"):
        wanted = '{"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": ...}'
        raise InvalidRequest(f"tool_choice: this is a choice of OpenAI's API: here, send {wanted}", field="tool_choice")
    if not isinstance(kind, str) or kind not in _CHOICES:
        wanted = "an object of type auto, any or none, or of type tool with a name"
        raise InvalidRequest(f"tool_choice must be {wanted}", field="tool_choice")
    return _CHOICES[kind]


def is_parallel(choice: Any) -> bool:
    """Returns whether an answer may have several calls."""
    return not (isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use") is True)


def _tool(tool: Any, name: str) -> dict[str, Any]:
    """Returns a tool in OpenAI's form. Refuses tools that only Anthropic's servers run or only its models know."""
    if isinstance(tool, Mapping) and (tool.get("type") == "function" or isinstance(tool.get("function"), Mapping)):
        wanted = '{"name": ..., "description": ..., "input_schema": ...}'
        raise InvalidRequest(f"{name}: a function is a tool of OpenAI's API: here, send {wanted}", field=name)
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"{name} must be an object with name and input_schema", field=name)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise UnsupportedFeature(f"{name}: tools of type {shown(str(kind))} are not supported here", field=name)
    if not isinstance(tool.get("input_schema"), Mapping):
        raise InvalidRequest(f"{name}.input_schema must be an object", field=f"{name}.input_schema")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    if function["description"] is None:
        del function["description"]
    elif not isinstance(function["description"], str):
        raise InvalidRequest(f"{name}.description must be a string", field=f"{name}.description")
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}
