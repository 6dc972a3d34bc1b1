"""Input items of /v1/responses, checked and brought into the messages of a chat."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

from router.dialects.openai.chat_messages import message_of
from router.text.prompts import MAX_MESSAGES
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest, UnsupportedFeature

TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text"})
"""Types of content parts that are text."""

SKIPPED_ITEMS = frozenset(
    {
        "additional_tools",
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "multi_agent_call",
        "multi_agent_call_output",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Types of items that only tools of OpenAI's own servers make. They are skipped: agents keep them in conversations that
began at those servers."""

REFUSED_ITEMS: Mapping[str, str] = {
    "item_reference": "this server stores no items: send the item itself",
    "compaction": "only the server that made it can read its content",
    "compaction_summary": "only the server that made it can read its content",
}
"""Types of items that cannot be skipped, because the conversation would change, and why they are refused."""

_OWN = "twostroke:"
"""Prefix of the `encrypted_content` in reasoning items that this server wrote."""


def encoded_reasoning(text: str) -> str:
    """Returns reasoning as `encrypted_content`, which some clients send back instead of text. It is not secret."""
    return _OWN + base64.b64encode(text.encode()).decode()


def messages_of(items: Any, instructions: str | None) -> tuple[Mapping[str, Any], ...]:
    """Returns the messages of a chat in the form of OpenAI's chat completions.

    `items` is a request's `input`, a text or a list of items. Raises InvalidRequest that names the item.
    """
    chat = _Chat()
    if instructions:
        chat.add({"role": "system", "content": instructions})
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise InvalidRequest("input must be a string or a list of items, and not empty", field="input")
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"input must have at most {MAX_MESSAGES} items, got {len(items)}", field="input")
    for index, item in enumerate(items):
        _add_item(chat, item, f"input[{index}]")
    if not chat.messages:
        raise InvalidRequest("input must have a message, or the output of a tool", field="input")
    return tuple(chat.messages)


class _Chat:
    """Messages so far. Items of one turn of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []
        """Reasoning of a turn whose message or call is still to come."""

    def think(self, text: str) -> None:
        if text:
            self._reasoning.append(text)

    def add(self, message: dict[str, Any]) -> None:
        if message["role"] == "assistant" and self._reasoning:
            message["reasoning_content"] = "\n".join(self._reasoning)
        self._reasoning.clear()
        self.messages.append(message)

    def call(self, message: dict[str, Any]) -> None:
        """Adds a tool call to the assistant's message before it, unless the assistant has thought in between."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or self._reasoning:
            self.add(message)
        else:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]


def _add_item(chat: _Chat, item: Any, name: str) -> None:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{name} must be an object", field=name)
    given = item.get("type") or ("message" if "role" in item else "none")
    kind = given if isinstance(given, str) else type(given).__name__
    add = _ADD.get(kind)
    if add is not None:
        add(chat, item, name)
    elif kind in REFUSED_ITEMS:
        raise UnsupportedFeature(f"{name}: items of type {kind} are not supported: {REFUSED_ITEMS[kind]}", field=name)
    elif kind not in SKIPPED_ITEMS:
        raise UnsupportedFeature(f"{name}: items of type {shown(kind)} are not supported", field=name)


def _message(chat: _Chat, item: Mapping[str, Any], name: str) -> None:
    content = _text(item.get("content"), f"{name}.content")
    chat.add(message_of({"role": item.get("role"), "content": content}, name))


def _agent_message(chat: _Chat, item: Mapping[str, Any], name: str) -> None:
    """Adds a message of one agent to another as a user's message to the model."""
    content = _text(item.get("content"), f"{name}.content")
    chat.add(message_of({"role": "user", "content": content, "name": item.get("author")}, name))


def _reasoning(chat: _Chat, item: Mapping[str, Any], name: str) -> None:
    """Reads the reasoning's text. What another server has encrypted is left out, and so are summaries."""
    content = item.get("content")
    chat.think(_text(content, f"{name}.content") if content else _decoded(item.get("encrypted_content")))


def _function_call(chat: _Chat, item: Mapping[str, Any], name: str) -> None:
    chat.call(_call_message(item, item.get("arguments"), name))


def _custom_call(chat: _Chat, item: Mapping[str, Any], name: str) -> None:
    if not isinstance(item.get("input"), str):
        raise InvalidRequest(f"{name}.input must be a string", field=f"{name}.input")
    chat.call(_call_message(item, {"input": item["input"]}, name))


def _call_message(item: Mapping[str, Any], arguments: Any, name: str) -> dict[str, Any]:
    call = {
        "id": _call_id(item, name),
        "type": "function",
        "function": {"name": item.get("name"), "arguments": arguments},
    }
    return message_of({"role": "assistant", "tool_calls": [call]}, name)


def _call_output(chat: _Chat, item: Mapping[str, Any], name: str) -> None:
    content = _text(item.get("output"), f"{name}.output")
    chat.add(message_of({"role": "tool", "tool_call_id": _call_id(item, name), "content": content}, name))


def _call_id(item: Mapping[str, Any], name: str) -> str:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not call_id:
        raise InvalidRequest(f"{name}.call_id must be a string, and not empty", field=f"{name}.call_id")
    return call_id


def _text(content: Any, name: str) -> str:
    """Joins the parts as those of a chat's messages are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{name} must be a string or a list of text parts", field=name)
    return "\n".join(_part_text(part, f"{name}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or not isinstance(kind, str) or (kind not in TEXT_PARTS and kind != "refusal"):
        raise UnsupportedFeature(f"{name}: only parts of text are supported, got {shown(str(kind))}", field=name)
    field = "refusal" if kind == "refusal" else "text"
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequest(f"{name}.{field} must be a string", field=name)
    return text


def _decoded(encoded: Any) -> str:
    if not isinstance(encoded, str) or not encoded.startswith(_OWN):
        return ""
    try:
        return base64.b64decode(encoded.removeprefix(_OWN), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


_ADD: Mapping[str, Callable[[_Chat, Mapping[str, Any], str], None]] = {
    "message": _message,
    "agent_message": _agent_message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _call_output,
}
