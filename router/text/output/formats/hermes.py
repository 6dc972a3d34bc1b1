"""Calls of Hermes and Qwen: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from router.text.output.framing import Framing, State, Tools, ToolUse, Unmarked
from router.text.output.grammars.calls import MAX_UNMARKED_TOOLS, CallGrammar, Marks, ToolSchema, object_rules
from router.text.output.values.call_object import CallObject
from router.text.output.values.json_scanner import Progress

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAGS = ("tool_call", "function_call", "tool", "tools", "response", "json", "JSON", "xml")
"""Words of the marks that models write around a call, their own one first. llama.cpp reads the same."""
_OPENINGS, _CLOSINGS = tuple(f"<{tag}>" for tag in _TAGS), tuple(f"</{tag}>" for tag in _TAGS)


def grammar(tools: Sequence[ToolSchema], use: ToolUse, marks: Marks) -> CallGrammar:
    """Returns the grammar of calls as Qwen's templates write them."""
    call = rf'"\n" call_object "\n" {marks.term(CLOSE)}'
    rules = object_rules(tools, "arguments")
    unmarked = _unmarked_rules(tools, use) if len(tools) <= MAX_UNMARKED_TOOLS else ()
    return CallGrammar(OPEN, call, r'"\n"', rules, ending=r'"\n"?', unmarked=unmarked)


def _unmarked_rules(tools: Sequence[ToolSchema], use: ToolUse) -> tuple[str, ...]:
    """Returns the rules of text up to and with a call that no mark announces, for each tool.

    If no other call may follow, it has what closes a list or a Markdown block of calls.
    """
    names = ["".join(f"\\x{{{ord(char):x}}}" for char in tool.name) for tool in tools]
    head = rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"NAME"{_SPACE},{_SPACE}"(arguments|parameters)"{_SPACE}:'
    rules = [f"up_to_unmarked_{index}[lazy]: TEXT /{head.replace('NAME', name)}/" for index, name in enumerate(names)]
    closing = "" if use.is_parallel else "CLOSING"
    calls = [f'(up_to_unmarked_{index} SPACE arguments_{index} SPACE "}}" {closing})' for index in range(len(tools))]
    ends = rf"CLOSING: /\}}?({_FEW}\])?({_FEW}```)?{_FEW}/"
    return (f"in_text_unmarked: {' | '.join(calls)}", *rules, f"SPACE: /{_FEW}/", ends)


_SPACE = r"[ \t\n\r]*"
_FEW = r"[ \t\n\r]{0,32}"
"""Whitespace after a call has begun. It is limited, so that a model cannot repeat it for ever."""


_FENCE = "```"
_LANGUAGES = frozenset({"", "json", "tool_call", "xml"})
"""Languages of a Markdown block that may hold calls, in small letters."""
_MAX_FENCE = 32
"""Characters of the line that opens a Markdown block of calls."""


class HermesSyntax:
    """A call stands after its mark, or without a mark at the beginning of a line.

    Without the mark, an object is a call if it names a tool and has arguments. It may stand in a list, in the text, or
    first in a Markdown block. Small models leave the mark out.
    """

    MARKS: ClassVar[tuple[str, ...]] = (*_OPENINGS, *_CLOSINGS)

    def __init__(self, tools: Tools, framing: Framing) -> None:
        self._tools = tools
        self._framing = framing
        self._object = CallObject(tools, framing)
        self._is_marked = self._is_unclosed = False
        """Whether the model's own mark stands before the object; whether a call still lacks its closing mark."""
        self._is_in_list = self._is_in_block = False
        """Whether what comes is in a list, or in a Markdown block, of calls."""
        self._fence = ""
        """The line so far, while it may open or close a Markdown block."""
        self._mark = ""
        """Characters so far of a mark inside a Markdown block."""
        self._text = TextLines()
        self.state: State = self._prose

    def end(self) -> None:
        """Drops the incomplete closing of a block, or of a call inside one."""
        if self.state == self._after_object or (self.state == self._in_mark and self._is_unclosed):
            self._framing.accept()

    def _prose(self, char: str) -> bool:
        prose = self._framing.prose
        is_bare = char in "{[`" and self._framing.unmarked is not Unmarked.NONE
        if is_bare and self._text.may_begin_call(is_blank=prose.is_blank):
            self._open(is_marked=False)
            return False
        if (
            char in ",;"
            and prose.is_blank
            and self._framing.parts.calls
            and self._framing.unmarked is not Unmarked.NONE
        ):
            self._framing.hold(char)  # another object may follow in the same line
            self._open(is_marked=False)
            return True
        self._text.take(char, is_blank=prose.is_blank)
        mark = prose.take(char)
        if mark == OPEN or (mark in _OPENINGS and self._framing.unmarked is not Unmarked.NONE):
            self._framing.hold(mark)
            self._open(is_marked=mark == OPEN)
        elif mark in _CLOSINGS and self._is_unclosed:
            prose.end_call()
            self._text.begin_line()
        elif mark:
            prose.emit(mark)
        if mark:
            self._is_unclosed = False
        return True

    def _open(self, *, is_marked: bool) -> None:
        self._is_marked, self._is_in_list, self._is_in_block = is_marked, False, False
        self.state = self._opening

    def _opening(self, char: str) -> bool:
        """Takes what stands before an object."""
        if char == "{":
            return self._begin_object()
        if char == "`" and not (self._is_in_block or self._is_in_list):
            self._fence = ""
            self.state = self._in_fence
            return False
        if char == "<" and self._is_in_block and not (self._is_in_list or self._is_marked):
            return self._begin_mark()
        if self._framing.is_full or not (char.isspace() or (char == "[" and not self._is_in_list)):
            return self._to_prose()
        self._is_in_list |= char == "["
        self._framing.hold(char)
        return True

    def _in_fence(self, char: str) -> bool:
        """Takes the line that opens a block."""
        is_open = self._fence.startswith(_FENCE)
        if char == "\n" and is_open and self._fence.removeprefix(_FENCE).strip().lower() in _LANGUAGES:
            self._is_in_block = True
            self.state = self._opening
        elif len(self._fence) >= _MAX_FENCE or not (char == "`" if len(self._fence) < len(_FENCE) else _is_word(char)):
            self._is_in_block = is_open
            return self._to_prose()
        self._fence += char
        self._framing.hold(char)
        return True

    def _begin_mark(self) -> bool:
        self._mark = ""
        self.state = self._in_mark
        return False

    def _in_mark(self, char: str) -> bool:
        """Takes a mark that announces or ends a call inside a Markdown block."""
        self._mark += char
        marks = (*_OPENINGS, *_CLOSINGS) if self._is_unclosed else _OPENINGS
        if not any(mark.startswith(self._mark) for mark in marks):
            return self._to_prose()
        self._framing.hold(char)
        if self._mark in _OPENINGS:
            self._is_marked, self.state = self._mark == OPEN, self._opening
        elif self._mark in _CLOSINGS:
            self._is_marked = self._is_unclosed = False
            self.state = self._after_object
        return True

    def _begin_object(self) -> bool:
        is_bare = not self._is_marked
        is_plain = is_bare and self._framing.unmarked is Unmarked.PLAIN
        self._object = CallObject(self._tools, self._framing, needs_arguments=is_bare, is_plain=is_plain)
        self.state = self._in_object
        return False

    def _in_object(self, char: str) -> bool:
        progress = self._object.take(char)
        self._is_unclosed = self._object.has_begun
        if progress is Progress.MORE:
            return True
        if progress is Progress.BROKEN:
            return self._to_prose()
        self._framing.accept()
        self._fence = ""
        self.state = self._after_object
        return True

    def _after_object(self, char: str) -> bool:
        """Takes what closes a list or a block of calls, or the next object there."""
        if not (self._is_in_list or self._is_in_block):
            self._text.begin_line()
            self.state = self._prose
            return False
        if char == "{" and not self._fence:
            return self._begin_object()
        if char == "<" and self._is_in_block and not (self._is_in_list or self._fence):
            return self._begin_mark()
        is_closing = self._is_in_block and char == "`"
        if self._framing.is_full or not (char.isspace() or is_closing or (self._is_in_list and char in ",]")):
            return self._to_prose()
        self._framing.hold(char)
        self._is_in_list &= char != "]"
        self._fence = self._fence + char if is_closing else ""
        if self._fence == _FENCE:
            self._is_in_block = False
        if not (self._is_in_list or self._is_in_block):
            self._framing.accept()
        return True

    def _to_prose(self) -> bool:
        """Makes text of what was held. A block that it opens is text up to its end."""
        self._text.is_in_block |= self._is_in_block and not self._is_marked
        self._text.go_on(self._framing.held)
        self._framing.give_up()
        self.state = self._prose
        return False


_SOMETHING = "."
"""Stands for a line that has begun, in which neither a call nor a block can begin."""


class TextLines:
    """Follows the lines of text, to know where a call may begin: at a line's beginning, outside of Markdown blocks."""

    def __init__(self) -> None:
        self.is_in_block = False
        self._line = ""
        """The beginning of the line, up to the length of what closes a block."""

    def may_begin_call(self, *, is_blank: bool) -> bool:
        """Returns whether a call may begin. `is_blank`: there was no text since the beginning or the last call, so
        indents are allowed.
        """
        return not self.is_in_block and (not self._line or (is_blank and self._line.isspace()))

    def take(self, char: str, *, is_blank: bool) -> None:
        if char == "\n":
            self.begin_line()
        elif len(self._line) < len(_FENCE) and not (is_blank and char.isspace()):
            self._line += char

    def begin_line(self) -> None:
        if self._line == _FENCE:
            self.is_in_block = not self.is_in_block
        self._line = ""

    def go_on(self, text: str) -> None:
        """Continues after text that was held back and is no call."""
        last = text.rpartition("\n")[2]
        self._line = _SOMETHING if last.strip() or not text else last


def _is_word(char: str) -> bool:
    return char.isalnum() or char in "_ \t\r"
