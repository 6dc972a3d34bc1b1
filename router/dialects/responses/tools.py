"""Tools of /v1/responses in the form of chat completions, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.dialects.openai.chat_messages import checked_tools
from router.dialects.openai.chat_tools import ANTHROPIC_CHOICES
from router.dialects.openai.custom_tools import check_names, checked_grammar, custom_function
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest, UnsupportedFeature

Json = dict[str, Any]

_MODES = ("none", "auto", "required")

_CHOICES: Mapping[str, str] = {**ANTHROPIC_CHOICES, "tool": '{"type": "function", "name": ...}'}


@dataclass(frozen=True, slots=True)
class ResponseTools:
    given: tuple[Json, ...] = ()
    """Tools as the response repeats them. Those that only OpenAI's servers have are left out."""
    choice: Any = "auto"
    """The client's choice, as the response repeats it."""
    allowed: frozenset[str] | None = None
    """Names of the tools that the choice allows. None: all."""

    @property
    def shown(self) -> tuple[Json, ...]:
        """Tools that the model sees: nothing but those that it may call."""
        return tuple(tool for tool in self.given if self.allowed is None or tool["name"] in self.allowed)

    @property
    def custom_names(self) -> frozenset[str]:
        return frozenset(tool["name"] for tool in self.shown if tool["type"] == "custom")

    @property
    def chat_tools(self) -> list[Json]:
        return [_chat_tool(tool) for tool in self.shown]

    @property
    def chat_choice(self) -> Any:
        """The choice as chat completions write it."""
        if isinstance(self.choice, str):
            return self.choice
        if self.choice["type"] == "allowed_tools":
            return self.choice["mode"]
        return {"type": "function", "function": {"name": self.choice["name"]}}


def read_tools(tools: Any, choice: Any) -> ResponseTools:
    """Reads `tools` and `tool_choice`. Raises InvalidRequest that names the field."""
    named = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(checked_tools(tools))]
    known = tuple(tool for tool in named if tool is not None)
    check_names(
        {tool["name"] for tool in known if tool["type"] == "custom"},
        (tool["name"] for tool in known if tool["type"] == "function"),
    )
    if choice is None or choice in _MODES:
        return ResponseTools(known, choice or "auto")
    if not isinstance(choice, dict):
        got = shown(choice) if isinstance(choice, str) else type(choice).__name__
        wanted = f"one of {', '.join(_MODES)}, or an object with a type, got {got}"
        raise InvalidRequest(f"tool_choice must be {wanted}", field="tool_choice")
    _refuse_other_forms(choice)
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(known, choice)
    if kind not in ("function", "custom"):
        what = shown(str(kind))
        raise UnsupportedFeature(f"tool_choice: {what} is not supported by this server", field="tool_choice")
    if not any(tool["name"] == choice.get("name") for tool in known):
        raise InvalidRequest("tool_choice must name one of the tools", field="tool_choice")
    return ResponseTools(known, {"type": kind, "name": choice["name"]})


def _refuse_other_forms(choice: Json) -> None:
    """Refuses a choice in the form of another API. The InvalidRequest says how it is written here."""
    kind = choice.get("type")
    if not isinstance(kind, str):
        return
    if kind in _CHOICES:
        reason = f"the type {kind} is of /v1/messages: here, send {_CHOICES[kind]}"
        raise InvalidRequest(f"tool_choice: {reason}", field="tool_choice")
    if kind in ("function", "custom", "allowed_tools") and isinstance(choice.get(kind), dict):
        fields = '"mode": ..., "tools": [...]' if kind == "allowed_tools" else '"name": ...'
        reason = f'an object {kind} is of /v1/chat/completions: here, send {{"type": "{kind}", {fields}}}'
        raise InvalidRequest(f"tool_choice: {reason}", field="tool_choice")


def _allowed(known: Sequence[Json], choice: Json) -> ResponseTools:
    allowed, mode = choice.get("tools"), choice.get("mode")
    if not isinstance(allowed, list) or mode not in ("auto", "required"):
        raise InvalidRequest('tool_choice must have tools and the mode "auto" or "required"', field="tool_choice")
    names = [tool["name"] for tool in known]  # no set: the name that a client sends may not be hashable
    kept = []
    for index, tool in enumerate(allowed):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise InvalidRequest(
                f"tool_choice.tools[{index}] must be an object with a type and a name", field="tool_choice"
            )
        if kind not in ("function", "custom"):
            continue  # of OpenAI's own servers, and left out as in tools
        if tool.get("name") not in names:
            wanted = f'{{"type": "{kind}", "name": ...}}'
            raise InvalidRequest(
                f"tool_choice.tools[{index}] must name one of the tools, as {wanted}", field="tool_choice"
            )
        kept.append({"type": kind, "name": tool["name"]})
    repeated = {"type": "allowed_tools", "mode": mode, "tools": kept}
    return ResponseTools(tuple(known), repeated, frozenset(tool["name"] for tool in kept))


def _tool(tool: Any, name: str) -> Json | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind is None and isinstance(tool, dict) and ("name" in tool or "function" in tool):
        kind = "function"  # as in chats, it may be left out
    if not isinstance(kind, str):
        raise InvalidRequest(f"{name} must be an object with a type", field=name)
    if kind not in ("function", "custom"):
        return None
    if kind == "custom" and "name" not in tool and isinstance(tool.get("custom"), dict):
        wanted = 'an object custom is of /v1/chat/completions: here, send {"type": "custom", "name": ...}'
        raise InvalidRequest(f"{name}: {wanted}", field=name)
    nested = tool.get("function")
    tool = nested if kind == "function" and isinstance(nested, dict) else tool
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest(f"{name} must have a name", field=name)
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{name}.description must be a string", field=name)
    if kind == "custom":
        described = {} if description is None else {"description": description}
        return {
            "type": kind,
            "name": tool["name"],
            **described,
            "format": _format(tool.get("format"), f"{name}.format"),
        }
    parameters, strict = tool.get("parameters"), tool.get("strict")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{name}.parameters must be an object", field=name)
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"{name}.strict must be true or false", field=name)
    fields = {"description": description, "parameters": parameters, "strict": bool(strict)}
    return {"type": kind, "name": tool["name"], **fields}


def _format(given: Any, name: str) -> Json:
    if given is None or (isinstance(given, dict) and given.get("type") == "text"):
        return {"type": "text"}
    if not isinstance(given, dict) or given.get("type") != "grammar":
        raise InvalidRequest(f"{name} must have the type text, or grammar with syntax and definition", field=name)
    return {"type": "grammar", **checked_grammar(given, name)}


def _chat_tool(tool: Json) -> Json:
    if tool["type"] == "custom":
        grammar = tool["format"] if tool["format"]["type"] == "grammar" else None
        return custom_function(tool["name"], tool.get("description"), grammar)
    described = {name: tool[name] for name in ("name", "description") if tool[name] is not None}
    parameters = tool["parameters"] or {"type": "object", "properties": {}}
    return {"type": "function", "function": {**described, "parameters": parameters, "strict": tool["strict"]}}
