"""Chat messages to one prompt text, by the Jinja template that comes with a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.errors import ConfigError, InvalidRequest

_TAG = "\ue000continue\ue001 "
"""Marks where an unfinished last message ends. Its final space shows whether the template trims messages."""


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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises InvalidRequest where the template refuses these messages."""
        chat = [dict(message) for message in messages]
        if continue_final_message:
            chat[-1]["content"] = str(chat[-1].get("content") or "") + _TAG
        names: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        names |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        try:
            rendered = self._template.render(names)
        except InvalidRequest:
            raise
        except Exception as error:  # a template is a program: with odd messages it can fail in any way
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}", field="messages") from error
        return _cut_at_tag(rendered) if continue_final_message else rendered


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
