"""System prompt and messages as Anthropic's API writes them, brought into OpenAI's form, which templates expect."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.cache_hints import MOST_HINTS, MessageHint, hint_s
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest, UnsupportedFeature

_ROLES = ("user", "assistant", "system")
_JOINED_ROLES = ("user", "assistant")
"""Roles whose consecutive messages are one turn."""
ERROR_MARK = "Error: "
"""Prefix of the text of a tool result that has `is_error`: templates have no field for errors."""

_BILLING_HEADERS = re.compile(r"(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")
"""Lines that Claude Code puts in front of its system prompt. Their value changes with every request, so that no two
prompts would have a block in common. They say nothing to a model."""

Block = Mapping[str, Any]


class ConversationBuilder:
    """Collects the messages of one chat, and its cache hints. Messages keep their order, system messages too."""

    def __init__(self) -> None:
        self._turns: list[list[dict[str, Any]]] = []
        """Messages so far, in one list per turn. Those of a turn are joined at the end, because that copies texts."""
        self.had_billing_header = False
        """Whether a billing header was taken out."""
        self._hints: list[MessageHint] = []
        self._tools: dict[str, str] = {}
        """Names of the tools that were called, by the call's id."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(map(_joined, self._turns))

    @property
    def hints(self) -> tuple[MessageHint, ...]:
        return tuple(self._hints[-MOST_HINTS:])

    @property
    def goes_on(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        last = self._turns[-1] if self._turns else []
        return bool(last) and last[0]["role"] == "assistant" and not any("tool_calls" in each for each in last)

    def add_system(self, system: Any, name: str) -> None:
        """Adds a system prompt. A message with only the billing header adds nothing."""
        texts, keep_s = [], None
        for block, at in _blocks(system, name):
            whole = _text(block, at)
            text = without_billing_header(whole)
            self.had_billing_header = self.had_billing_header or text != whole
            if text or not whole:
                texts.append(text)
                keep_s = _keep_s(block, at, keep_s)
        if texts:
            self._add({"role": "system", "content": "\n".join(texts)}, keep_s)

    def add(self, message: Any, name: str) -> None:
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{name} must be an object with role and content", field=name)
        role, content, field = message.get("role"), message.get("content"), f"{name}.content"
        match role:
            case "user":
                self._add_user(content, field)
            case "assistant":
                self._add_assistant(content, field)
            case "system":
                self.add_system(content, field)
            case _:
                wrong = shown(role) if isinstance(role, str) else type(role).__name__
                wanted = f"{name}.role must be one of {', '.join(_ROLES)}, got {wrong}"
                raise InvalidRequest(wanted, field=f"{name}.role")

    def keep(self, value: Any, messages: int, name: str) -> None:
        """Adds a hint for the first `messages` messages. It stands elsewhere in the request than at a message."""
        self._hints.append(MessageHint(messages, hint_s(value, name)))

    def _add(self, message: dict[str, Any], keep_s: float | None) -> None:
        """Adds a message. As in Anthropic's API, it joins the turn before it if that has the same role."""
        if self._turns and message["role"] == self._turns[-1][0]["role"] in _JOINED_ROLES:
            self._turns[-1].append(message)
        else:
            self._turns.append([message])
        if keep_s is not None:
            self._hints.append(MessageHint(len(self._turns), keep_s))

    def _add_user(self, content: Any, name: str) -> None:
        """Adds a user's message. In OpenAI's form tool results are separate messages. The texts between them are
        joined.
        """
        texts: list[str] = []
        keep_s, has_results = None, False
        for block, at in _blocks(content, name):
            if block["type"] == "tool_result":
                if texts:
                    self._add({"role": "user", "content": "\n".join(texts)}, keep_s)
                    texts, keep_s = [], None
                has_results = True
                self._add(self._tool_message(block, at), _keep_s(block, at, None))
            else:
                texts.append(_text(block, at))
                keep_s = _keep_s(block, at, keep_s)
        if texts or not has_results:
            self._add({"role": "user", "content": "\n".join(texts)}, keep_s)

    def _tool_message(self, block: Block, name: str) -> dict[str, Any]:
        called = block.get("tool_use_id")
        if not isinstance(called, str):
            raise InvalidRequest(f"{name}.tool_use_id must be a string", field=f"{name}.tool_use_id")
        content = block.get("content")
        parts = [] if content is None else _blocks(content, f"{name}.content")
        text = "\n".join(_text(part, at) for part, at in parts)
        message = {"role": "tool", "tool_call_id": called, "content": text}
        if block.get("is_error") is True:
            message["content"] = ERROR_MARK + text
        return message | ({"name": self._tools[called]} if called in self._tools else {})

    def _add_assistant(self, content: Any, name: str) -> None:
        texts, reasoning, calls, keep_s = [], [], [], None
        for block, at in _blocks(content, name):
            match block["type"]:
                case "tool_use":
                    calls.append(self._call(block, at))
                case "thinking":
                    reasoning.append(_string(block, "thinking", at))
                case "redacted_thinking":
                    continue  # encrypted: only the server that wrote it can read it
                case _:
                    texts.append(_text(block, at))
            keep_s = _keep_s(block, at, keep_s)
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if reasoning:
            message["reasoning_content"] = "\n".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        self._add(message, keep_s)

    def _call(self, block: Block, name: str) -> dict[str, Any]:
        call_id, tool, arguments = _string(block, "id", name), _string(block, "name", name), block.get("input")
        if not isinstance(arguments, Mapping):
            raise InvalidRequest(f"{name}.input must be an object", field=f"{name}.input")
        self._tools[call_id] = tool
        return {"id": call_id, "type": "function", "function": {"name": tool, "arguments": arguments}}


def _joined(turn: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the messages of one turn as one message, as if their blocks had been sent in one."""
    message = dict(turn[0])
    for field in ("content", "reasoning_content"):
        if texts := [text for each in turn if (text := each.get(field))]:
            message[field] = "\n".join(texts)
    if calls := [call for each in turn for call in each.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return message


def _blocks(content: Any, name: str) -> list[tuple[Block, str]]:
    """Returns the blocks of a content, each with its field's name. A string is one text block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, name)]
    if not isinstance(content, list):
        raise InvalidRequest(f"{name} must be a string or a list of content blocks", field=name)
    blocks = [(block, f"{name}[{index}]") for index, block in enumerate(content)]
    for block, at in blocks:
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise InvalidRequest(f"{at} must be an object with a type", field=at)
    return blocks


def _text(block: Block, name: str) -> str:
    if block["type"] != "text":
        kind = shown(block["type"])
        raise UnsupportedFeature(f"{name}: content blocks of type {kind} are not supported here", field=name)
    return _string(block, "text", name)


def _string(block: Block, field: str, name: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}.{field} must be a string", field=f"{name}.{field}")
    return value


def _keep_s(block: Block, name: str, before_s: float | None) -> float | None:
    """Returns the seconds of a block's hint, or `before_s`, those of the blocks before it, if it has none."""
    value = block.get("cache_control")
    return before_s if value is None else hint_s(value, f"{name}.cache_control")


def without_billing_header(text: str) -> str:
    """Returns a system text without the header's lines. Only lines at its beginning are taken for the header."""
    header = _BILLING_HEADERS.match(text)
    return text[header.end() :] if header else text
