"""What the syntaxes of tool calls have in common: text around calls, and the held beginning of what may become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from router.frontend.output.collected_parts import CallIds, CollectedParts
from router.frontend.output.parts import Part
from router.frontend.output.prose import Prose

MAX_HELD = 16 << 10
"""Characters held back because they may begin a call; with more they are text."""

Tools = Mapping[str, frozenset[str]]
"""Names of the tools that may be called, each with the parameters that are always strings."""

State = Callable[[str], bool]
"""Takes one character. False: it has changed the state, and the new state has to take the character."""


class Syntax(Protocol):
    """A machine that takes an answer's text one character at a time, so that no piece of it can matter."""

    MARKS: ClassVar[tuple[str, ...]]
    """Texts that may begin or end a call in the middle of other text."""
    state: State

    def end(self) -> None:
        """Takes the end of the answer."""


class Framing:
    """Text that is held back is either framing, once a call begins, or text, once it cannot become a call."""

    def __init__(self, marks: Sequence[str], call_id: CallIds) -> None:
        self.parts = CollectedParts(call_id)
        self.prose = Prose(marks, self.parts.add_text)
        self._held: list[str] = []
        self._held_chars = 0

    @property
    def is_full(self) -> bool:
        """No more may be held: `give_up` then."""
        return self._held_chars >= MAX_HELD

    def hold(self, text: str) -> None:
        self._held.append(text)
        self._held_chars += len(text)

    def begin_call(self, name: str) -> None:
        """Begins a call: what was held is its framing."""
        self.accept()
        self.parts.begin_call(name)

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

    def flush(self) -> list[Part]:
        self._syntax.end()
        self._framing.give_up()
        self._framing.prose.flush()
        return self._framing.parts.take()
