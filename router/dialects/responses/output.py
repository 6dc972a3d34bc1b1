"""Output items of one response, built from the parts of an answer, and their events in a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from router.dialects.openai.custom_tools import CustomInput
from router.dialects.reply import Json
from router.dialects.responses.items import encoded_reasoning
from router.text.output.parts import Part, ReasoningPart, TextPart, ToolCallPart


class ItemEvent(NamedTuple):
    kind: str
    """The event's type, without `response.`."""
    fields: Json


Events = Iterator[ItemEvent]


class OutputItem(Protocol):
    """One item while it is written. Its methods yield the events of what they do."""

    item_id: str

    def takes(self, part: Part) -> bool:
        """Returns whether a part belongs to this item."""

    def open(self) -> Events: ...

    def add(self, part: Part, logprobs: Sequence[Json]) -> Events: ...

    def close(self) -> Events:
        """Yields what comes before the event with the whole item."""

    def body(self, status: str) -> Json: ...


class MessageItem:
    def __init__(self, item_id: str) -> None:
        self.item_id = item_id
        self.texts: list[str] = []
        self._logprobs: list[Json] = []

    def takes(self, part: Part) -> bool:
        return isinstance(part, TextPart)

    def open(self) -> Events:
        yield ItemEvent("content_part.added", {"content_index": 0, "part": self._part()})

    def add(self, part: Part, logprobs: Sequence[Json]) -> Events:
        assert isinstance(part, TextPart)
        self.texts.append(part.text)
        self._logprobs += logprobs
        yield self.delta(part.text, logprobs)

    def delta(self, text: str, logprobs: Sequence[Json]) -> ItemEvent:
        return ItemEvent("output_text.delta", {"content_index": 0, "delta": text, "logprobs": list(logprobs)})

    def close(self) -> Events:
        whole = self._part()
        told = {"content_index": 0, "text": whole["text"], "logprobs": whole["logprobs"]}
        yield ItemEvent("output_text.done", told)
        yield ItemEvent("content_part.done", {"content_index": 0, "part": whole})

    def body(self, status: str) -> Json:
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self) -> Json:
        return {
            "type": "output_text",
            "text": "".join(self.texts),
            "annotations": [],
            "logprobs": list(self._logprobs),
        }


class ReasoningItem:
    """Reasoning as the model wrote it. Nothing here makes summaries of it."""

    def __init__(self, item_id: str, *, is_encoded: bool) -> None:
        """`is_encoded`: the item has `encrypted_content`, which the client sends back."""
        self.item_id = item_id
        self._is_encoded = is_encoded
        self._texts: list[str] = []

    def takes(self, part: Part) -> bool:
        return isinstance(part, ReasoningPart)

    def open(self) -> Events:
        yield ItemEvent("content_part.added", {"content_index": 0, "part": self._part()})

    def add(self, part: Part, logprobs: Sequence[Json]) -> Events:
        assert isinstance(part, ReasoningPart)
        self._texts.append(part.text)
        yield ItemEvent("reasoning_text.delta", {"content_index": 0, "delta": part.text})

    def close(self) -> Events:
        whole = self._part()
        yield ItemEvent("reasoning_text.done", {"content_index": 0, "text": whole["text"]})
        yield ItemEvent("content_part.done", {"content_index": 0, "part": whole})

    def body(self, status: str) -> Json:
        body: Json = {"id": self.item_id, "type": "reasoning", "summary": [], "status": status}
        body["content"] = [] if status == "in_progress" else [self._part()]
        if self._is_encoded:
            body["encrypted_content"] = None if status == "in_progress" else encoded_reasoning("".join(self._texts))
        return body

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": "".join(self._texts)}


class CallItem:
    """A call of a function, or of a custom tool, whose arguments hold its input."""

    def __init__(self, item_id: str, part: ToolCallPart, *, is_custom: bool) -> None:
        self.item_id = item_id
        self._call_index, self._call_id, self._name = part.number, part.call_id, part.name
        self._input = CustomInput() if is_custom else None
        self._kind, self._field, self._event = (
            ("custom_tool_call", "input", "custom_tool_call_input")
            if is_custom
            else ("function_call", "arguments", "function_call_arguments")
        )
        self._texts: list[str] = []

    def takes(self, part: Part) -> bool:
        return isinstance(part, ToolCallPart) and part.number == self._call_index

    def open(self) -> Events:
        yield from ()

    def add(self, part: Part, logprobs: Sequence[Json]) -> Events:
        assert isinstance(part, ToolCallPart)
        yield from self._delta(part.arguments if self._input is None else self._input.feed(part.arguments))

    def close(self) -> Events:
        named = {"name": self._name} if self._input is None else {}
        yield from self._delta("" if self._input is None else self._input.end())
        yield ItemEvent(f"{self._event}.done", {**named, self._field: "".join(self._texts)})

    def body(self, status: str) -> Json:
        return {
            "id": self.item_id,
            "type": self._kind,
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            self._field: "".join(self._texts),
        }

    def _delta(self, text: str) -> Events:
        if text:
            self._texts.append(text)
            yield ItemEvent(f"{self._event}.delta", {"delta": text})


class OutputItems:
    """All items of one response, one after the other."""

    def __init__(self, response: str, custom_names: frozenset[str], *, encodes_reasoning: bool) -> None:
        """`response` is part of the id of every item. `custom_names`: names of custom tools."""
        self._response = response
        self._custom_names = custom_names
        self._encodes_reasoning = encodes_reasoning
        self._closed: list[Json] = []
        self._current: OutputItem | None = None
        self._logprobs: list[Json] = []
        """Logprobs of tokens whose text has not come yet."""

    @property
    def is_reasoning(self) -> bool:
        return isinstance(self._current, ReasoningItem)

    @property
    def index(self) -> int:
        """Index of the current item in the output, or of the next one."""
        return len(self._closed)

    def add_text(self, text: str) -> bool:
        """Adds text to the current item. Returns False, and adds nothing, if that is not a message."""
        if not isinstance(self._current, MessageItem):
            return False
        self._current.texts.append(text)
        return True

    def text_delta(self, text: str) -> ItemEvent:
        """Returns the event of text that `add_text` has added."""
        assert isinstance(self._current, MessageItem)
        (event,) = self._named(iter([self._current.delta(text, [])]))
        return event

    def hold(self, logprobs: Sequence[Json]) -> None:
        """Keeps logprobs of tokens until their text comes."""
        self._logprobs += logprobs

    def add(self, part: Part) -> Events:
        if isinstance(part, TextPart | ReasoningPart) and not part.text:
            return
        if self._current is None or not self._current.takes(part):
            yield from self.close("completed")
            self._current = self._new_item(part)
            yield self._item_event("output_item.added", self._current.body("in_progress"))
            yield from self._named(self._current.open())
        told, self._logprobs = self._logprobs, []
        yield from self._named(self._current.add(part, told))

    def end(self, status: str) -> Events:
        """Closes the last item. The output of an answer without items is an empty message."""
        if self._current is None and not self._closed:
            self._current = self._message()
            yield self._item_event("output_item.added", self._current.body("in_progress"))
            yield from self._named(self._current.open())
        if isinstance(self._current, MessageItem) and self._logprobs:
            yield from self._named(self._current.add(TextPart(""), self._logprobs))
        yield from self.close(status)

    def close(self, status: str) -> Events:
        if self._current is None:
            return
        yield from self._named(self._current.close())
        whole = self._current.body(status)
        yield self._item_event("output_item.done", whole)
        self._closed.append(whole)
        self._current = None

    def bodies(self) -> list[Json]:
        """Returns all items. The current one, if there is one, is incomplete."""
        return [*self._closed, *([] if self._current is None else [self._current.body("incomplete")])]

    def _item_event(self, kind: str, item: Json) -> ItemEvent:
        return ItemEvent(kind, {"output_index": self.index, "item": item})

    def _named(self, events: Events) -> Events:
        assert self._current is not None
        for kind, fields in events:
            yield ItemEvent(kind, {"item_id": self._current.item_id, "output_index": self.index, **fields})

    def _new_item(self, part: Part) -> OutputItem:
        if isinstance(part, TextPart):
            return self._message()
        if isinstance(part, ReasoningPart):
            return ReasoningItem(self._item_id("rs"), is_encoded=self._encodes_reasoning)
        is_custom = part.name in self._custom_names
        return CallItem(self._item_id("ctc" if is_custom else "fc"), part, is_custom=is_custom)

    def _message(self) -> MessageItem:
        return MessageItem(self._item_id("msg"))

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._response}_{self.index}"
