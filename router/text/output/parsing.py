"""Which parsers take the text of an answer apart."""

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
    """How a model writes calls and reasoning: names of lines of the two tables, empty where it writes none."""

    calls: str = ""
    reasoning: str = ""

    @classmethod
    def of(cls, template: str, config: OutputConfig) -> OutputFormats:
        """Returns what flags name, and where they name nothing what the chat template shows."""
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
    """How the text of one prompt's answers is taken apart."""

    formats: OutputFormats
    tools: Tools = field(default_factory=dict)
    """Empty: calls are text."""
    is_reasoning_open: bool = False
    """Whether the prompt has begun the reasoning."""

    unmarked: Unmarked = Unmarked.ANY

    @property
    def special(self) -> frozenset[str]:
        """Special tokens that have to stay in the text."""
        special: tuple[str, ...] = ()
        if self.formats.reasoning:
            special += REASONING_BY_NAME[self.formats.reasoning].special
        if self._whole_format:
            special += TOOLS_BY_NAME[self._whole_format].special
        return frozenset(special)

    def parser(self, stream: str, choice: int) -> OutputParser:
        """Returns the parser of one choice. Every router gives its calls the same ids."""
        calls = None
        if self._whole_format:
            form = TOOLS_BY_NAME[self._whole_format]
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
        return reasoning if calls is None else _InOrder(reasoning, calls)

    @property
    def _whole_format(self) -> str:
        """Name of the format of calls that is looked for; empty: none is."""
        is_both = self.formats.reasoning and REASONING_BY_NAME[self.formats.reasoning].make is None
        return self.formats.reasoning if is_both else self.formats.calls if self.tools else ""


class _InOrder:
    """Looks for calls in what is not reasoning."""

    def __init__(self, reasoning: OutputParser, calls: OutputParser) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def has_calls(self) -> bool:
        return self._calls.has_calls

    def feed(self, text: str) -> list[Part]:
        return self._told(self._reasoning.feed(text))

    def flush(self, *, is_cut: bool = False) -> list[Part]:
        return [*self._told(self._reasoning.flush(is_cut=is_cut)), *self._calls.flush(is_cut=is_cut)]

    def _told(self, parts: Sequence[Part]) -> list[Part]:
        told: list[Part] = []
        for part in parts:
            told += self._calls.feed(part.text) if isinstance(part, TextPart) else [part]
        return told


def callable_tools(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Returns names of tools, given in OpenAI's form, with the schemas of their arguments; any where they have none."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return {name: schema if isinstance(schema, Mapping) else {} for name, schema in schemas.items()}


def _drawn(stream: str, choice: int, index: int) -> str:
    return hashlib.blake2b(f"{stream} {choice} {index}".encode(), digest_size=16, person=b"tool calls").hexdigest()
