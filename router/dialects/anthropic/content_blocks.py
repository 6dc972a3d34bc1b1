"""The content blocks of an answer, built from its parts: as events of a stream, or whole."""

from __future__ import annotations

import json
from typing import Any

from router.dialects.reply import Json, quoted, typed_event
from router.text.output.parts import INVALID_JSON, Part, ReasoningPart, TextPart, ToolCallPart


class _Block:
    """One block so far."""

    def __init__(self, part: Part) -> None:
        self.part = part
        """The first part of the block."""
        self.pieces: list[str] = []

    def has(self, part: Part) -> bool:
        """Returns whether a part belongs to this block."""
        first = self.part
        return type(part) is type(first) and not (
            isinstance(part, ToolCallPart) and isinstance(first, ToolCallPart) and part.number != first.number
        )


class ContentBlocks:
    """Builds the blocks of one answer.

    A part of another kind, or of another tool call, begins a new block. No block begins with an empty text.
    """

    def __init__(self, signature: str) -> None:
        """`signature` is the signature of thinking blocks. Clients send it back, and it is not checked."""
        self._signature = signature
        self._blocks: list[_Block] = []
        self._head = ""
        """What stands before the text of each delta of the open block."""
        self.has_calls = False

    def add(self, part: Part) -> None:
        """Keeps a part for `whole`."""
        if self._goes_on(part) or self._open(part):
            self._blocks[-1].pieces.append(_text_of(part))

    def events(self, part: Part) -> str:
        """Returns the events of a stream for a part."""
        begun = ""
        if not self._goes_on(part):
            ended = self.end()
            if not self._open(part):
                return ""
            begun = ended + self._start(part)
        text = _text_of(part)
        return f"{begun}{self._head}{quoted(text)}}}}}\n\n" if text else begun

    def end(self) -> str:
        """Returns the events that end the open block, if there is one."""
        if not self._blocks:
            return ""
        index = len(self._blocks) - 1
        signed = ""
        if isinstance(self._blocks[-1].part, ReasoningPart):
            delta = {"type": "signature_delta", "signature": self._signature}
            signed = typed_event({"type": "content_block_delta", "index": index, "delta": delta})
        return signed + typed_event({"type": "content_block_stop", "index": index})

    def whole(self) -> list[Json]:
        return [self._whole(block) for block in self._blocks]

    def _goes_on(self, part: Part) -> bool:
        return bool(self._blocks) and self._blocks[-1].has(part)

    def _open(self, part: Part) -> bool:
        """Opens a block for a part. Returns False, and opens none, for an empty text."""
        if isinstance(part, ToolCallPart):
            self.has_calls = True
        elif not part.text:
            return False
        self._blocks.append(_Block(part))
        return True

    def _start(self, part: Part) -> str:
        """Returns the event that starts the open block in a stream, and prepares the head of its deltas."""
        index = len(self._blocks) - 1
        match part:
            case TextPart():
                delta, field, block = "text_delta", "text", {"type": "text", "text": ""}
            case ReasoningPart():
                block, delta, field = (
                    {"type": "thinking", "thinking": "", "signature": ""},
                    "thinking_delta",
                    "thinking",
                )
            case ToolCallPart():
                delta, field, block = "input_json_delta", "partial_json", _call(part, {})
        # One event is made for every token: all but its text is written once.
        frame = f'{{"type":"content_block_delta","index":{index},"delta":{{"type":"{delta}","{field}":'
        self._head = f"event: content_block_delta\ndata: {frame}"
        return typed_event({"type": "content_block_start", "index": index, "content_block": block})

    def _whole(self, block: _Block) -> Json:
        text = "".join(block.pieces)
        match block.part:
            case TextPart():
                return {"type": "text", "text": text}
            case ReasoningPart():
                return {"type": "thinking", "thinking": text, "signature": self._signature}
            case ToolCallPart() as call:
                return _call(call, _arguments(text))


def _text_of(part: Part) -> str:
    return part.arguments if isinstance(part, ToolCallPart) else part.text


def _call(call: ToolCallPart, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}


def _arguments(text: str) -> Json:
    """Returns the arguments as an object. Text that is no JSON object becomes the field that Anthropic's docs name."""
    try:
        arguments: Any = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {INVALID_JSON: text}
