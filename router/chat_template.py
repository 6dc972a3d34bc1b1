"""Chat messages to one prompt text, by the Jinja template that comes with a model."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.params import ChatPrompt
from twostroke.errors import ConfigError, InvalidRequest

_TAG = "\ue000continue\ue001 "
"""Marks where an unfinished last message ends. Its final space shows whether the template trims messages."""

_MARKS = range(0xF0000, 0xFFFFE)
"""Characters for private use, of which a chat has seldom one and never all."""


class ChatTemplate:
    """One template, compiled once in the sandbox and with the conventions that published templates are written for."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}", field="model_dir") from error
        self._special_tokens = dict(special_tokens)

    def render(self, chat: ChatPrompt) -> str:
        """Raises InvalidRequest where the template refuses these messages."""
        messages = [dict(message) for message in chat.messages]
        if chat.continue_final_message:
            messages[-1]["content"] = str(messages[-1].get("content") or "") + _TAG
        names: dict[str, Any] = {"tools": list(chat.tools) or None, "documents": None}
        names |= {**self._special_tokens, **chat.variables}
        names |= {"messages": messages, "add_generation_prompt": chat.add_generation_prompt}
        try:
            rendered = self._template.render(names)
        except InvalidRequest:
            raise
        except Exception as error:  # a template is a program: with odd messages it can fail in any way
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}", field="messages") from error
        return _cut_at_tag(rendered) if chat.continue_final_message else rendered


class Guard:
    """Keeps special tokens that a client wrote from becoming real ones.

    A mark is put into each of them before the template is rendered. The specials that are whole in the rendered text
    are then the template's own; the text between them is encoded as ordinary text, without the marks.
    """

    def __init__(self, special_texts: Sequence[str], chat: ChatPrompt) -> None:
        self._special = re.compile("|".join(re.escape(text) for text in sorted(special_texts, key=len, reverse=True)))
        self._chat = chat
        written = [text for value in (chat.messages, chat.variables, chat.tools) for text in _texts(value)]
        self.is_needed = bool(special_texts) and any(self._special.search(text) for text in written)
        characters = frozenset().union(*written) if self.is_needed else frozenset()
        self._mark = next(mark for mark in map(chr, _MARKS) if mark not in characters)

    @property
    def guarded(self) -> ChatPrompt:
        """The chat with the marks."""
        return dataclasses.replace(
            self._chat,
            messages=self._marked(self._chat.messages),
            variables=self._marked(self._chat.variables),
            tools=self._marked(self._chat.tools),
        )

    def pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """The rendered text in order, without the marks: (text, whether it is a special token)."""
        at = 0
        for special in self._special.finditer(rendered):
            if special.start() > at:
                yield rendered[at : special.start()].replace(self._mark, ""), False
            yield special[0], True
            at = special.end()
        if at < len(rendered):
            yield rendered[at:].replace(self._mark, ""), False

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._special.sub(lambda special: special[0][0] + self._mark + special[0][1:], value)
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._marked, value))
        return value


def _texts(value: Any) -> Iterator[str]:
    """All strings in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield key
            yield from _texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)


def _cut_at_tag(rendered: str) -> str:
    start = rendered.rfind(_TAG.rstrip())
    if start < 0:
        raise InvalidRequest(
            "continue_final_message: the model's chat template leaves the last message out", field="messages"
        )
    kept = rendered[:start]
    return kept if rendered.startswith(_TAG, start) else kept.rstrip()


def _raise_exception(message: str) -> NoReturn:
    raise InvalidRequest(f"messages do not fit the model's chat template: {message}", field="messages")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
