"""The parts of an answer, as parsers find them in its text and dialects write them."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

INVALID_JSON: Final = "INVALID_JSON"
"""Name of the field for arguments that are no JSON object, as those of a call that was cut. It is Anthropic's name."""


class TextPart(NamedTuple):
    """A piece of what the model says to the user."""

    text: str


class ReasoningPart(NamedTuple):
    """A piece of what the model says to itself."""

    text: str


class ToolCallPart(NamedTuple):
    """A piece of a tool call. The first piece of each call has its name; later ones only add to the arguments."""

    number: int
    """Number of the call in its answer, from 0."""
    call_id: str
    name: str = ""
    """Name of the tool, only in the first piece."""
    arguments: str = ""
    """What is added to the arguments, which are JSON text."""


Part = TextPart | ReasoningPart | ToolCallPart


class OutputParser(Protocol):
    """A state machine over the text of one answer.

    What it has returned so far, joined, is a function of the text so far and not of where the pieces ended: an answer
    that is resumed or migrated is parsed again from its beginning, with the same result.
    """

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun: the answer's finish reason is `tool_calls` where it would be `stop`."""

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that are certain after this piece of text."""

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        """Returns what was held back, at the end of the answer. `is_cut`: the model would have continued."""
