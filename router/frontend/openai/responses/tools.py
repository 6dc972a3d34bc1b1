"""Tools of /v1/responses in the form of chat completions. A custom tool is a function with one text, `input`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.frontend.openai.chat_messages import MAX_TOOLS
from twostroke.client_text import shown
from twostroke.errors import InvalidRequest, UnsupportedFeature

Json = dict[str, Any]

CUSTOM_INPUT = "input"
"""Name of the one argument that a custom tool has as a function."""


@dataclass(frozen=True, slots=True)
class ResponseTools:
    shown: tuple[Json, ...] = ()
    """Tools that the model sees, as the response repeats them. Those that only OpenAI's servers have are left out."""
    choice: Any = "auto"
    """The client's choice, as the response repeats it."""

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
    if tools is not None and (not isinstance(tools, list) or len(tools) > MAX_TOOLS):
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS} tools", field="tools")
    named = [_tool(tool, f"tools[{rank}]") for rank, tool in enumerate(tools or ())]
    known = [tool for tool in named if tool is not None]
    if choice is None or choice in ("none", "auto", "required"):
        return ResponseTools(tuple(known), choice or "auto")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        return _allowed(known, choice)
    if kind not in ("function", "custom"):
        what = shown(str(kind or choice))
        raise UnsupportedFeature(f"tool_choice: {what} is not supported by this server", field="tool_choice")
    if not any(tool["name"] == choice.get("name") for tool in known):
        raise InvalidRequest("tool_choice must name one of the tools", field="tool_choice")
    return ResponseTools(tuple(known), {"type": kind, "name": choice["name"]})


def _allowed(known: Sequence[Json], choice: Mapping[str, Any]) -> ResponseTools:
    """Shows the model nothing but the tools that it may call."""
    allowed, mode = choice.get("tools"), choice.get("mode")
    if not isinstance(allowed, list) or mode not in ("auto", "required"):
        raise InvalidRequest('tool_choice must have tools and the mode "auto" or "required"', field="tool_choice")
    names = [tool.get("name") for tool in allowed if isinstance(tool, dict)]
    return ResponseTools(tuple(tool for tool in known if tool["name"] in names), dict(choice))


def _tool(tool: Any, name: str) -> Json | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{name} must be an object with a type", field=name)
    if kind not in ("function", "custom"):
        return None
    nested = tool.get("function")
    tool = nested if kind == "function" and isinstance(nested, dict) else tool
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest(f"{name} must have a name", field=name)
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{name}.description must be a string", field=name)
    common = {"type": kind, "name": tool["name"], **({} if description is None else {"description": description})}
    if kind == "custom":
        return {**common, "format": _format(tool.get("format"), f"{name}.format")}
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{name}.parameters must be an object", field=name)
    return {**common, "parameters": parameters, "strict": bool(tool.get("strict", False))}


def _format(given: Any, name: str) -> Json:
    if given is None or (isinstance(given, dict) and given.get("type") == "text"):
        return {"type": "text"}
    parts = [given.get(part) for part in ("type", "syntax", "definition")] if isinstance(given, dict) else [None]
    if parts[0] != "grammar" or not all(isinstance(part, str) for part in parts):
        raise InvalidRequest(f"{name} must have the type text, or grammar with syntax and definition", field=name)
    return {"type": parts[0], "syntax": parts[1], "definition": parts[2]}


def _chat_tool(tool: Json) -> Json:
    described = {name: tool[name] for name in ("name", "description") if name in tool}
    if tool["type"] == "function":
        parameters = tool["parameters"] or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**described, "parameters": parameters, "strict": tool["strict"]}}
    form = tool["format"]
    if form["type"] == "grammar":
        rule = f"The input must match this {form['syntax']} grammar:\n{form['definition']}"
        described["description"] = "\n".join(filter(None, [tool.get("description"), rule]))
    text = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
    return {"type": "function", "function": {**described, "parameters": text}}
