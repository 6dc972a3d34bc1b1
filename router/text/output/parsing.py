"""Chooses the parsers that split the text of an answer into reasoning, tool calls and other text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.text.output.framing import Tools, Unmarked
from router.text.output.output_formats import REASONING_BY_NAME, TOOLS_BY_NAME, reasoning_format_in, tool_format_in
from router.text.output.parts import OutputParser, Part, TextPart
from twostroke.base.errors import ConfigError
from twostroke.config.output import AUTO, NONE, OutputConfig


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats in which a model writes calls and reasoning, by their names in `output_formats`. Empty: none."""

    calls: str = ""
    reasoning: str = ""

    @classmethod
    def of(cls, template: str, config: OutputConfig) -> OutputFormats:
        """Returns the formats that the flags name. For a flag that is `auto`, the chat template decides."""
        calls, reasoning = config.tool_call_parser, config.reasoning_parser
        found = tool_format_in(template), reasoning_format_in(template)
        called, reasoned = (each.name if each else "" for each in found)
        if calls != AUTO:
            called = "" if calls == NONE else TOOLS_BY_NAME[calls].name
        if reasoning != AUTO:
            reasoned = "" if reasoning == NONE else REASONING_BY_NAME[reasoning].name
        if reasoned and REASONING_BY_NAME[reasoned].make is None and called not in ("", reasoned):
            raise ConfigError(
                f"--reasoning-parser {reasoned} does not go with --tool-call-parser {called}",
                field="--reasoning-parser",
            )
        return cls(called, reasoned)


NO_FORMATS = OutputFormats()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsing:
    """How the answers to one prompt are parsed."""

    formats: OutputFormats
    tools: Tools = field(default_factory=dict)
    """Tools that may be called. Empty: calls are text."""
    is_reasoning_open: bool = False
    """Whether the prompt has begun the reasoning."""

    unmarked: Unmarked = Unmarked.ANY

    @property
    def special(self) -> frozenset[str]:
        """Special tokens that have to stay in the text."""
        special: tuple[str, ...] = ()
        if self.formats.reasoning:
            special += REASONING_BY_NAME[self.formats.reasoning].special
        if self._call_format:
            special += TOOLS_BY_NAME[self._call_format].special
        return frozenset(special)

    def parser(self, stream: str, choice: int) -> OutputParser:
        """Returns the parser of one choice. Every router gives its calls the same ids."""
        calls = None
        if self._call_format:
            form = TOOLS_BY_NAME[self._call_format]
            calls = form.parser(
                self.tools,
                lambda index: form.call_id(_drawn(stream, choice, index)),
                unmarked=self.unmarked,
            )
        make = REASONING_BY_NAME[self.formats.reasoning].make if self.formats.reasoning else None
        if make is None:
            assert calls is not None
            return calls
        reasoning = make(self.is_reasoning_open)
        return reasoning if calls is None else _ReasoningAndCalls(reasoning, calls)

    @property
    def _call_format(self) -> str:
        """Name of the tool format that parses calls, and reasoning if it parses both. Empty: calls are text."""
        is_both = self.formats.reasoning and REASONING_BY_NAME[self.formats.reasoning].make is None
        return self.formats.reasoning if is_both else self.formats.calls if self.tools else ""


class _ReasoningAndCalls:
    """Parses reasoning first, and then calls in the text that is not reasoning."""

    def __init__(self, reasoning: OutputParser, calls: OutputParser) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def has_calls(self) -> bool:
        return self._calls.has_calls

    def feed(self, text: str) -> list[Part]:
        return self._with_calls(self._reasoning.feed(text))

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        return [*self._with_calls(self._reasoning.flush(is_cut=is_cut)), *self._calls.flush(is_cut=is_cut)]

    def _with_calls(self, parts: Sequence[Part]) -> list[Part]:
        parsed: list[Part] = []
        for part in parts:
            parsed += self._calls.feed(part.text) if isinstance(part, TextPart) else [part]
        return parsed


def callable_tools(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Returns the schemas of arguments by name of the tool, for tools in OpenAI's form. None given: any arguments."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return {name: schema if isinstance(schema, Mapping) else {} for name, schema in schemas.items()}


def _drawn(stream: str, choice: int, index: int) -> str:
    return hashlib.blake2b(f"{stream} {choice} {index}".encode(), digest_size=16, person=b"tool calls").hexdigest()
