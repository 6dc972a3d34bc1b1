"""Which of its tools an answer may or must call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolUse:
    must_call: bool = False
    """The answer is one or more calls, without any text."""
    only: str | None = None
    """Name of the one tool that may be called. None: all may."""
    is_parallel: bool = True
    """An answer may have several calls."""
    keeps_arguments: bool = False
    """Arguments are kept to the tools' schemas, where they can be, also if no tool is strict."""
