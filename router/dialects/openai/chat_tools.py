"""Tools of a chat and its `tool_choice`: custom tools become functions, tools that are not allowed are left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from router.dialects.openai.custom_tools import check_names, checked_grammar, custom_function
from router.dialects.reply import Json
from twostroke.base.errors import InvalidRequest

_KINDS = ("function", "custom")
"""Types of tools. A tool's own fields are in an object that has the name of its type."""

ANTHROPIC_CHOICES: Mapping[str, str] = {"auto": '"auto"', "any": '"required"', "none": '"none"'}
"""JSON of the `tool_choice` in OpenAI's API that means the same as a type in Anthropic's. The type `tool`, which names
a tool, is not here: chats and /v1/responses write it differently."""
_CHOICES = {**ANTHROPIC_CHOICES, "tool": '{"type": "function", "function": {"name": ...}}'}


@dataclass(frozen=True, slots=True)
class ChatTools:
    functions: Any
    """The allowed tools as functions. What is not a tool is kept as the client sent it."""
    choice: Any
    """`tool_choice` among these functions. What is no choice is kept as the client sent it."""
    custom_names: frozenset[str] = frozenset()
    """Names of the functions that are custom tools."""


def read_chat_tools(tools: Any, choice: Any) -> ChatTools:
    """Reads `tools` and `tool_choice`. Raises InvalidRequest, naming the field, for a malformed custom tool or
    `allowed_tools`, and for the forms of other APIs.
    """
    if not isinstance(tools, list):
        return ChatTools(tools, choice)
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    known = [(_is_custom(tool), name) for tool, name in zip(tools, map(_name_of, functions), strict=True)]
    custom = frozenset(name for is_custom, name in known if is_custom)
    check_names(custom, (name for is_custom, name in known if not is_custom))
    if not isinstance(choice, dict):
        return ChatTools(functions, choice, custom)
    kind = choice.get("type")
    if kind == "allowed_tools":
        names, mode = _allowed(choice, [_name_of(function) for function in functions])
        return ChatTools([function for function in functions if _name_of(function) in names], mode, custom)
    if isinstance(kind, str) and kind in _CHOICES:
        wanted = f"tool_choice: the type {kind} is of /v1/messages: in a chat, send {_CHOICES[kind]}"
        raise InvalidRequest(wanted, field="tool_choice")
    if kind in _KINDS and kind not in choice and "name" in choice:
        raise InvalidRequest(f"tool_choice: {_nested(kind)}", field="tool_choice")
    if kind == "custom":
        return ChatTools(functions, {"type": "function", "function": choice.get("custom")}, custom)
    return ChatTools(functions, choice, custom)


def _is_custom(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "custom"


def _function(tool: Any, name: str) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind not in (*_KINDS, None):
        return tool
    if "input_schema" in tool:
        wanted = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        raise InvalidRequest(f"{name}: input_schema is of /v1/messages: in a chat, send {wanted}", field=name)
    if "name" in tool and not any(kind in tool for kind in _KINDS):
        raise InvalidRequest(f"{name}: {_nested(kind or 'function')}", field=name)
    return _custom_function(tool.get("custom"), f"{name}.custom") if kind == "custom" else tool


def _nested(kind: str) -> str:
    fields = f'{{"type": "{kind}", "{kind}": {{"name": ...}}}}'
    return f"in a chat the name stands in an object: {fields}; only /v1/responses has it beside the type"


def _custom_function(tool: Any, name: str) -> Json:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest(f"{name} must be an object with a name", field=name)
    description, form = tool.get("description"), tool.get("format")
    if not isinstance(description, str | None):
        raise InvalidRequest(f"{name}.description must be a string", field=f"{name}.description")
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return custom_function(tool["name"], description, None)
    if not isinstance(form, dict) or form.get("type") != "grammar":
        raise InvalidRequest(
            f"{name}.format must have the type text, or grammar with an object grammar", field=f"{name}.format"
        )
    return custom_function(tool["name"], description, checked_grammar(form.get("grammar"), f"{name}.format.grammar"))


def _name_of(tool: Any) -> Any:
    """Returns the name of a tool or of a reference to one. None: it has none."""
    fields = [tool[kind] for kind in _KINDS if isinstance(tool.get(kind), dict)] if isinstance(tool, dict) else []
    name = fields[0].get("name") if fields else None
    return name if isinstance(name, str) else None


def _allowed(choice: Json, known: Collection[Any]) -> tuple[Collection[Any], str]:
    """Returns the names that may be called, and the choice among them."""
    allowed = choice.get("allowed_tools")
    if allowed is None and "tools" in choice:
        form = '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
        reason = f"in a chat mode and tools stand in an object: {form}; only /v1/responses has them beside the type"
        raise InvalidRequest(f"tool_choice: {reason}", field="tool_choice")
    given = allowed if isinstance(allowed, dict) else {}
    tools, mode = given.get("tools"), given.get("mode")
    if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
        wanted = 'allowed_tools with tools and the mode "auto" or "required"'
        raise InvalidRequest(f"tool_choice must have {wanted}", field="tool_choice")
    for index, tool in enumerate(tools):
        name = _name_of(tool)
        if name is None or name not in known:
            wanted = '{"type": "function", "function": {"name": ...}}'
            raise InvalidRequest(
                f"tool_choice.allowed_tools.tools[{index}] must name one of the tools, as {wanted}", field="tool_choice"
            )
    return [_name_of(tool) for tool in tools], mode
