"""Text, reasoning and calls of an answer in the fields of a chat completion's messages and deltas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.frontend.http.reply import Json
from router.frontend.output.parts import Part, ReasoningPart, TextPart, ToolCallPart
from twostroke.request import FinishReason


def has_calls(parts: Iterable[Part]) -> bool:
    return any(isinstance(part, ToolCallPart) for part in parts)


def finish_reason(reason: FinishReason, *, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason is FinishReason.STOP else reason.value


def delta_of(parts: Sequence[Part]) -> Json:
    """Returns what one event adds, in one delta: a client that resumes the stream gets whole events.

    A call's first piece has its id, type and name; what an event adds to one call is one entry.
    """
    said = "".join(part.text for part in parts if isinstance(part, TextPart))
    calls: dict[int, Json] = {}
    for part in parts:
        if not isinstance(part, ToolCallPart):
            continue
        call = calls.setdefault(part.rank, {"index": part.rank, "function": {"arguments": ""}})
        if part.name:
            call |= {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}}
        call["function"]["arguments"] += part.arguments
    return {
        **({"content": said} if said else {}),
        **_reasoning(parts),
        **({"tool_calls": list(calls.values())} if calls else {}),
    }


def message_of(parts: Sequence[Part]) -> Json:
    """Returns the fields of a whole message."""
    said = "".join(part.text for part in parts if isinstance(part, TextPart))
    arguments: dict[int, list[str]] = {}
    heads: dict[int, ToolCallPart] = {}
    for part in parts:
        if isinstance(part, ToolCallPart):
            heads.setdefault(part.rank, part)
            arguments.setdefault(part.rank, []).append(part.arguments)
    calls = [
        {
            "id": head.call_id,
            "type": "function",
            "function": {"name": head.name, "arguments": "".join(arguments[rank])},
        }
        for rank, head in heads.items()
    ]
    return {"content": said or None, **_reasoning(parts), **({"tool_calls": calls} if calls else {})}


def _reasoning(parts: Sequence[Part]) -> Json:
    """Returns the reasoning under both names that clients of vLLM's API know."""
    thought = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    return {"reasoning_content": thought, "reasoning": thought} if thought else {}
