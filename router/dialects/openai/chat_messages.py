"""Messages and tools of a chat as OpenAI's API writes them, checked and brought into the form that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.dialects.openai.custom_tools import CUSTOM_INPUT
from router.text.output.framing import ToolUse
from router.text.output.parts import INVALID_JSON
from router.text.prompts import check_role
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest, UnsupportedFeature

MAX_TOOLS = 1024
"""Most tools of one request."""
_FUNCTION = (None, "function")
"""Types of a tool that is a function. None: clients may leave the type out, as in vLLM."""
_TYPED = {"type": "function"}


def checked_tools(tools: Any) -> Sequence[Any]:
    """Returns the tools, an empty tuple for None. Raises InvalidRequest for a list that is too long, or no list."""
    if tools is not None and (not isinstance(tools, list) or len(tools) > MAX_TOOLS):
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS} tools", field="tools")
    return tools or ()


def tools_of(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns the tools that the template shows to the model, whether they may be called or not."""
    tools = checked_tools(tools or None)
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") in _FUNCTION else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            name = f"tools[{index}]"
            raise InvalidRequest(f"{name} must have the type function, and a function with a name", field=name)
    return tuple({**_TYPED, **tool, **_TYPED} for tool in tools)


def tool_use_of(
    tools: Sequence[Mapping[str, Any]], choice: Any, is_parallel: bool | None = None, *, keeps_arguments: bool = False
) -> ToolUse | None:
    """Returns how the tools may be called. None: not at all."""
    parallel = is_parallel is not False
    if choice in (None, "auto", "none"):
        can_call = tools and choice != "none"
        return ToolUse(is_parallel=parallel, keeps_arguments=keeps_arguments) if can_call else None
    if not tools:
        raise InvalidRequest("tool_choice is only allowed with tools", field="tool_choice")
    if choice in ("required", "any"):
        return ToolUse(must_call=True, is_parallel=parallel)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict):
        wanted = '"none", "auto", "required" or an object with the type function and a name'
        raise InvalidRequest(f"tool_choice must be {wanted}", field="tool_choice")
    name = function.get("name")
    if not any(tool["function"]["name"] == name for tool in tools):
        raise InvalidRequest("tool_choice must name one of the tools", field="tool_choice")
    return ToolUse(must_call=True, only=name, is_parallel=False)


def message_of(entry: Any, name: str) -> dict[str, Any]:
    """Returns one message as templates expect it: its content is text."""
    if not isinstance(entry, dict):
        raise InvalidRequest(f"{name} must be an object with role and content", field=name)
    role = check_role(entry.get("role"), f"{name}.role")
    if entry.get("function_call"):
        raise UnsupportedFeature(
            f"{name}.function_call is not supported: use tool_calls", field=f"{name}.function_call"
        )
    message: dict[str, Any] = {"role": role, "content": _content(entry, f"{name}.content")}
    if entry.get("tool_calls"):
        message["tool_calls"] = _tool_calls(entry["tool_calls"], f"{name}.tool_calls")
    for extra in ("name", "reasoning_content", "tool_call_id"):
        if isinstance(entry.get(extra), str):
            message[extra] = entry[extra]
    return message


def _tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{name} must be a list of calls", field=name)
    return [_tool_call(call, f"{name}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, name: str) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object, as published templates read them. Clients send them as text.

    The arguments of a call that was cut are not valid JSON. Their text becomes a field of an object (`INVALID_JSON`).
    """
    if isinstance(call, dict) and call.get("type") == "custom":
        return _custom_call(call, name)
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{name}.function must be an object with name and arguments", field=f"{name}.function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {INVALID_JSON: arguments}
    return {**call, "function": {**function, "arguments": arguments}}


def _custom_call(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the call of a custom tool as a call of the function that the model sees in its place."""
    custom = call.get("custom")
    fields = (custom.get("name"), custom.get("input")) if isinstance(custom, dict) else (None, None)
    if not all(isinstance(field, str) for field in fields):
        raise InvalidRequest(f"{name}.custom must be an object with name and input, both texts", field=f"{name}.custom")
    others = {key: value for key, value in call.items() if key != "custom"}
    return {**others, "type": "function", "function": {"name": fields[0], "arguments": {CUSTOM_INPUT: fields[1]}}}


def _content(entry: Mapping[str, Any], name: str) -> str:
    content = entry.get("content")
    if content is None and entry["role"] in ("assistant", "tool"):
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{name} must be a string or a list of text parts", field=name)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = shown(str(part.get("type"))) if isinstance(part, dict) else type(part).__name__
            raise UnsupportedFeature(f"{name}[{index}]: only parts of type text are supported, got {kind}", field=name)
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{name}[{index}].text must be a string", field=name)
        texts.append(part["text"])
    return "\n".join(texts)
