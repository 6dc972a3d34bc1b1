"""What all syntaxes of tool calls need: the text around calls, and a held-back prefix of what may become a call."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from router.text.output.collected_parts import CallIds, CollectedParts
from router.text.output.parts import Part
from router.text.output.prose import Prose
from router.text.output.values.arguments_text import ArgumentsText

MAX_HELD = 16 << 10
"""Most characters that are held back because they may begin a call. If there are more, they are text."""

Tools = Mapping[str, Mapping[str, Any]]
"""Names of the tools that may be called, each with the JSON schema of its arguments."""

State = Callable[[str], bool]
"""Takes one character. False: it has changed the state, and the new state has to take the character."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which of its tools an answer may or must call."""

    must_call: bool = False
    """Whether the answer is one or more calls, without any text."""
    only: str | None = None
    """Name of the one tool that may be called. None: all may."""
    is_parallel: bool = True
    """Whether an answer may have several calls."""
    keeps_arguments: bool = False
    """Whether a grammar enforces the tools' schemas of arguments, if it can, even if no tool is strict."""


class Unmarked(enum.StrEnum):
    """Which objects without a mark before them are calls, in formats that have a mark."""

    ANY = enum.auto()
    """Objects with the name of a tool, and with arguments."""
    PLAIN = enum.auto()
    """Objects that the grammar of an answer finds, too: first the name, without escapes, then an object."""
    NONE = enum.auto()


class Syntax(Protocol):
    """A state machine that takes an answer's text one character at a time, however the text was split."""

    MARKS: ClassVar[tuple[str, ...]]
    """Texts that may begin or end a call in the middle of other text."""
    state: State

    def __init__(self, tools: Tools, framing: Framing) -> None: ...

    def end(self) -> None:
        """Takes the end of the answer."""


class Framing:
    """Holds back text that may begin a call. It is framing once the call has begun, and text once no call can begin."""

    def __init__(self, marks: Sequence[str], call_id: CallIds, *, unmarked: Unmarked = Unmarked.ANY) -> None:
        self.unmarked = unmarked
        self.parts = CollectedParts(call_id)
        self.prose = Prose(marks, self.parts.add_text)
        self._held: list[str] = []
        self._held_chars = 0

    @property
    def is_full(self) -> bool:
        """Whether no more may be held, so that the syntax has to call `give_up`."""
        return self._held_chars >= MAX_HELD

    @property
    def held(self) -> str:
        return "".join(self._held)

    def hold(self, text: str) -> None:
        self._held.append(text)
        self._held_chars += len(text)

    def hold_space(self, char: str) -> bool:
        """Holds whitespace. Returns False for anything else, and where no more may be held."""
        if not char.isspace() or self.is_full:
            return False
        self.hold(char)
        return True

    def begin_call(self, name: str, arguments: ArgumentsText) -> None:
        """Begins a call: what was held is its framing."""
        self.accept()
        self.parts.begin_call(name, arguments)

    def accept(self) -> None:
        """Drops what was held, which is framing of calls, with the whitespace around it."""
        self._held.clear()
        self._held_chars = 0
        self.prose.end_call()

    def give_up(self) -> None:
        """Makes text of what was held."""
        if self._held:
            self.prose.emit("".join(self._held))
        self._held.clear()
        self._held_chars = 0


class FramedParser:
    """The parser of one answer by one syntax."""

    def __init__(self, syntax: Syntax, framing: Framing) -> None:
        self._syntax = syntax
        self._framing = framing

    @property
    def has_calls(self) -> bool:
        return self._framing.parts.calls > 0

    def feed(self, text: str) -> list[Part]:
        syntax = self._syntax
        for char in text:
            while not syntax.state(char):
                pass
        return self._framing.parts.take()

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        self._syntax.end()
        if is_cut:
            self._framing.parts.end(is_cut=True)
        self._framing.give_up()
        self._framing.prose.flush()
        self._framing.parts.end(is_cut=False)
        return self._framing.parts.take()
