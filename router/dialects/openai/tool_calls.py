"""Text, reasoning and calls of an answer in the fields of a chat completion's messages and deltas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.dialects.openai.custom_tools import CustomInput, custom_input
from router.dialects.reply import Json
from router.text.output.parts import Part, ReasoningPart, TextPart, ToolCallPart


def has_calls(parts: Iterable[Part]) -> bool:
    return any(isinstance(part, ToolCallPart) for part in parts)


class MessageDeltas:
    """Turns the parts of events into deltas of one choice's message."""

    def __init__(self, custom_names: frozenset[str]) -> None:
        """`custom_names`: names of custom tools."""
        self._custom_names = custom_names
        self._inputs: dict[int, CustomInput] = {}
        """Inputs of calls of custom tools, by index."""

    def delta_of(self, parts: Sequence[Part], *, is_last: bool) -> Json:
        """Returns all that one event adds as one delta, because a stream is only resumed after whole events.

        The first entry of a call has its id, type and name. An event adds at most one entry for each call.
        """
        content = "".join(part.text for part in parts if isinstance(part, TextPart))
        calls: dict[int, Json] = {}
        for part in parts:
            if isinstance(part, ToolCallPart):
                self._add_call(calls, part)
        if is_last:
            for index, text in self._inputs.items():
                self._add_input(calls, index, text.end())
        return {
            **({"content": content} if content else {}),
            **_reasoning(parts),
            **({"tool_calls": list(calls.values())} if calls else {}),
        }

    def _add_call(self, calls: dict[int, Json], part: ToolCallPart) -> None:
        if part.name in self._custom_names:
            self._inputs[part.number] = CustomInput()
            custom = {"name": part.name, "input": ""}
            calls[part.number] = {"index": part.number, "id": part.call_id, "type": "custom", "custom": custom}
        if part.number in self._inputs:
            self._add_input(calls, part.number, self._inputs[part.number].feed(part.arguments))
            return
        call = calls.setdefault(part.number, {"index": part.number, "function": {"arguments": ""}})
        if part.name:
            call |= {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}}
        call["function"]["arguments"] += part.arguments

    def _add_input(self, calls: dict[int, Json], index: int, text: str) -> None:
        if text:
            calls.setdefault(index, {"index": index, "custom": {"input": ""}})["custom"]["input"] += text


def message_of(parts: Sequence[Part], custom_names: frozenset[str]) -> Json:
    """Returns the fields of a whole message. `custom_names`: names of custom tools."""
    content = "".join(part.text for part in parts if isinstance(part, TextPart))
    arguments: dict[int, list[str]] = {}
    heads: dict[int, ToolCallPart] = {}
    for part in parts:
        if isinstance(part, ToolCallPart):
            heads.setdefault(part.number, part)
            arguments.setdefault(part.number, []).append(part.arguments)
    calls = [_call(head, "".join(arguments[index]), custom_names) for index, head in heads.items()]
    return {"content": content or None, **_reasoning(parts), **({"tool_calls": calls} if calls else {})}


def _call(head: ToolCallPart, arguments: str, custom_names: frozenset[str]) -> Json:
    if head.name in custom_names:
        custom = {"name": head.name, "input": custom_input(arguments)}
        return {"id": head.call_id, "type": "custom", "custom": custom}
    return {"id": head.call_id, "type": "function", "function": {"name": head.name, "arguments": arguments}}


def _reasoning(parts: Sequence[Part]) -> Json:
    """Returns the reasoning under both names that clients of vLLM's API know."""
    thought = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    return {"reasoning_content": thought, "reasoning": thought} if thought else {}
