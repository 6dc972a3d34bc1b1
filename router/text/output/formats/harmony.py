"""Answers of gpt-oss: messages with channels, which are reasoning, text or calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from router.text.output.framing import MAX_HELD, Framing, State, Tools, ToolUse
from router.text.output.grammars.calls import (
    CallGrammar,
    Marks,
    ToolSchema,
    alternatives,
    arguments_rules,
)
from router.text.output.prose import MarkMatcher
from router.text.output.values.arguments_text import ArgumentsText
from router.text.output.values.json_scanner import Progress, quoted

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, RETURN, CALL = "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"

MAX_HEADER = 512
"""Most characters of a message's header, from its role to its content type."""


def grammar(tools: Sequence[ToolSchema], use: ToolUse, marks: Marks) -> CallGrammar:
    """Returns the grammar of at most one call, after any reasoning. The end token follows the arguments."""
    mark = marks.term
    calls = [
        f'{quoted(f"commentary to=functions.{tool.name} ")} {mark(CONSTRAIN)} "json" {mark(MESSAGE)} arguments_{index}'
        for index, tool in enumerate(tools)
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
        self._tool = ""
        self._arguments = ArgumentsText()
        self._has_begun = False
        self._held: list[str] = []
        """The message to a tool so far, until it is certain that it is a call."""
        self.state: State = self._first_header

    def end(self) -> None:
        """Makes text of a header that no message follows; a prefix of a mark belongs to the message."""
        held = self._matcher.held
        if self.state == self._body:
            self._add(held)
            self._end_arguments()
        elif self.state != self._outside:
            self._framing.parts.add_text(self._header_text() + held)

    def _first_header(self, char: str) -> bool:
        """Takes the beginning of the first header, which some answers leave out: they are text then."""
        header = (self._header + char).lstrip()
        if header.startswith(("<", "to=")):
            self.state = self._in_header
            return False
        if (header and not "to=".startswith(header)) or len(self._header) >= MAX_HEADER:
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
            self._framing.parts.add_text(self._header_text())
            self._after_message(mark)
        elif len(self._header) > MAX_HEADER:
            self._begin_text()
        return True

    def _begin_text(self) -> None:
        self._framing.parts.add_text(self._header_text())
        self._header = ""
        self._add = self._framing.parts.add_text
        self.state = self._body

    def _header_text(self) -> str:
        """Returns the text of a header that turned out not to be one."""
        header = self._header.removeprefix("assistant")
        return header.replace(CHANNEL, "").replace(CONSTRAIN, "")

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
            self._tool, self._arguments, self._has_begun = tool, ArgumentsText(), False
            self._add = self._add_arguments
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

    def _add_arguments(self, text: str) -> None:
        """Adds to the arguments of a call, which begins with its arguments. What cannot follow is text."""
        for index, char in enumerate(text):
            progress = self._arguments.take(char)
            if progress is Progress.BROKEN or len(self._held) >= MAX_HELD:
                self._say(text[index:])
                return
            if not self._has_begun:
                self._held.append(char)
            if not self._has_begun and (self._arguments.has_begun or progress is Progress.DONE):
                self._begin_call()
            if progress is Progress.DONE:
                self._add = self._after_arguments
                self._add(text[index + 1 :])
                return

    def _begin_call(self) -> None:
        self._held.clear()
        self._has_begun = True
        self._framing.parts.begin_call(self._tool, self._arguments)

    def _end_arguments(self) -> None:
        """Ends a message to a tool. An empty one is a call without arguments."""
        if self._add != self._add_arguments or self._has_begun:
            return
        if "".join(self._held).strip():
            self._say("")
        else:
            self._begin_call()

    def _say(self, text: str) -> None:
        """Makes text of the rest of a message to a tool, and of all of it if no call has begun."""
        self._add = self._framing.parts.add_text
        if not self._has_begun:
            self._add(f"to=functions.{self._tool} {''.join(self._held)}")
            self._held.clear()
        self._add(text)

    def _after_arguments(self, text: str) -> None:
        if text.strip():
            self._say(text)

    def _after_message(self, mark: str) -> None:
        """Goes on after a mark that ends a message, or begins another one."""
        self._end_arguments()
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
