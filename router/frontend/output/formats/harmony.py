"""Answers of gpt-oss: messages with channels, which are reasoning, text or calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from router.frontend.output.framing import Framing, State, Tools
from router.frontend.output.marks import Marks, quoted
from router.frontend.output.prose import MarkMatcher
from router.frontend.output.tool_grammar import (
    CallGrammar,
    ToolSchema,
    alternatives,
    arguments_rules,
)
from router.frontend.output.tool_use import ToolUse

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, RETURN, CALL = "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"

MAX_HEADER = 512
"""Characters of a message's header, from its role to its content type."""


def grammar(tools: Sequence[ToolSchema], use: ToolUse, marks: Marks) -> CallGrammar:
    """Returns the grammar of at most one call, behind any reasoning. The end token follows the arguments."""
    mark = marks.term
    calls = [
        f'{quoted(f"commentary to=functions.{tool.name} ")} {mark(CONSTRAIN)} "json" {mark(MESSAGE)} arguments_{rank}'
        for rank, tool in enumerate(tools)
    ]
    thinks = f'{mark(CHANNEL)} "analysis" {mark(MESSAGE)} {marks.after_text(END)} {mark(START)} "assistant"'
    says = "" if use.must_call else f'| "final" {mark(MESSAGE)} TEXT'
    rules = (f"thinks: {thinks}", alternatives("one_call", calls), *arguments_rules(tools), marks.lazy_rule(END))
    return CallGrammar("", f"thinks* {mark(CHANNEL)} (one_call {says})", None, rules)


_TO = r"(?:to=(?P<{}>[\w.-]+)\s*)?"
_HEADER = re.compile(
    rf"\s*(?:assistant\s*)?{_TO.format('first')}"
    rf"(?:<\|channel\|>\s*(?P<channel>analysis|commentary|final)\s*{_TO.format('second')})?"
    r"(?:<\|constrain\|>\s*)?(?:json|code)?\s*"
)
"""A message's header: role, recipient, channel and type of its content, all of which may be left out."""


class HarmonySyntax:
    """A message to a tool is a call, whatever its channel; others on the channel `analysis` are reasoning, all others
    text. The prompt has begun the first message's header."""

    MARKS: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)

    def __init__(self, tools: Tools, framing: Framing) -> None:
        self._tools = tools
        self._framing = framing
        self._matcher = MarkMatcher(self.MARKS)
        self._header = ""
        self._add = framing.parts.add_text
        self.state: State = self._first_header

    def end(self) -> None:
        """Makes text of a header that no message follows; the beginning of a mark belongs to the message."""
        held = self._matcher.held
        if self.state == self._body:
            self._add(held)
        elif self.state != self._outside:
            self._framing.parts.add_text(self._said() + held)

    def _first_header(self, char: str) -> bool:
        """Takes the beginning of the first header, which some answers leave out: they are text then."""
        said = (self._header + char).lstrip()
        if said.startswith(("<", "to=")):
            self.state = self._in_header
            return False
        if (said and not "to=".startswith(said)) or len(self._header) >= MAX_HEADER:
            self._begin_text()
            return False
        self._header += char
        return True

    def _in_header(self, char: str) -> bool:
        text, mark = self._matcher.take(char)
        self._header += text
        if mark == MESSAGE:
            self._begin_body()
        elif mark in (CHANNEL, CONSTRAIN):
            self._header += mark
        elif mark:
            self._framing.parts.add_text(self._said())
            self._after_message(mark)
        elif len(self._header) > MAX_HEADER:
            self._begin_text()
        return True

    def _begin_text(self) -> None:
        self._framing.parts.add_text(self._said())
        self._header = ""
        self._add = self._framing.parts.add_text
        self.state = self._body

    def _said(self) -> str:
        """Returns what a header says that turned out to be none."""
        said = self._header.removeprefix("assistant")
        return said.replace(CHANNEL, "").replace(CONSTRAIN, "")

    def _begin_body(self) -> None:
        header = _HEADER.fullmatch(self._header)
        if header is None:
            self._begin_text()
            return
        recipient = header["first"] or header["second"] or ""
        tool = recipient.removeprefix("functions.")
        self._header = ""
        self.state = self._body
        if tool != recipient and tool in self._tools:
            self._framing.parts.begin_call(tool)
            self._add = self._framing.parts.add_arguments
            return
        is_reasoning = header["channel"] == "analysis"
        self._add = self._framing.parts.add_reasoning if is_reasoning else self._framing.parts.add_text
        if recipient:
            self._add(f"to={recipient} ")

    def _body(self, char: str) -> bool:
        text, mark = self._matcher.take(char)
        self._add(text)
        if mark and mark not in (MESSAGE, CONSTRAIN):
            self._after_message(mark)
        return True

    def _after_message(self, mark: str) -> None:
        """Goes on behind a mark that ends a message, or begins another one."""
        self._header = mark if mark == CHANNEL else ""
        self._add = self._framing.parts.add_text
        self.state = self._in_header if mark in (START, CHANNEL) else self._outside

    def _outside(self, char: str) -> bool:
        """Takes what is between messages, where nothing but whitespace belongs."""
        text, mark = self._matcher.take(char)
        if text.strip():
            self._framing.parts.add_text(text)
            self.state = self._body
        elif mark in (START, CHANNEL):
            self._after_message(mark)
        return True
