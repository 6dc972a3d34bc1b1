"""Tools and the choice among them as Anthropic's API writes them, brought into OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.dialects.openai.chat_messages import MAX_TOOLS
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest, UnsupportedFeature

_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}


def openai_tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS} tools", field="tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def openai_choice(choice: Any) -> str | dict[str, Any] | None:
    """Returns the `tool_choice`. None: the client has not said."""
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
    """Tells whether an answer may have several calls."""
    return not (isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use") is True)


def _tool(tool: Any, name: str) -> dict[str, Any]:
    """Refuses tools that Anthropic's servers run or that its models know by heart: no other model knows them."""
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
