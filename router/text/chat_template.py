"""Renders chat messages to a prompt's text, with the Jinja templates of a model: one, or several by name."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.prompts import ChatPrompt
from twostroke.base.client_text import shown
from twostroke.base.errors import ConfigError, InvalidRequest, UnsupportedFeature
from twostroke.models.catalog.places import TEMPLATES

_TAG = "\ue000continue\ue001 "
"""Marks where an unfinished last message ends. Its final space shows whether the template trims messages."""

_MARKS = range(0xF0000, 0xFFFFE)
"""Private-use characters, which chats seldom have. A chat that has all of them is refused."""


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
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(self, chat: ChatPrompt) -> str:
        """Returns the text of the prompt. Raises InvalidRequest if the template refuses the messages."""
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


class SpecialTexts:
    """Finds a model's special tokens, and prefixes of them, in what clients write."""

    def __init__(self, texts: Iterable[str], normalize: Callable[[str], str] = lambda text: text) -> None:
        """`normalize`: what the tokenizer does to a text before it looks for special tokens."""
        self.pattern = _any_of(texts := sorted(texts, key=len, reverse=True))
        self._normalize = normalize
        self._normalized = _any_of(filter(None, map(normalize, texts)))
        # Without special tokens that are like words: other words may end with a prefix of them, and templates compare
        # words, so these must stay without marks.
        self._beginnings = tuple({text[:end] for text in texts if not text[0].isalnum() for end in range(1, len(text))})

    def are_in(self, text: str) -> bool:
        normal = self._normalize(text)
        return bool(self.pattern.search(text) or self._normalized.search(normal)) or any(
            map(self.may_begin, (text, normal))
        )

    def may_begin(self, text: str) -> bool:
        """Returns whether a special token may begin at the end of the text. A template that adds another text may
        complete it.
        """
        return text.rstrip().endswith(self._beginnings)


class Guard:
    """Keeps special tokens that a client wrote from becoming real ones.

    A mark is put into each of them, and after a text that ends with a prefix of one, before the template is
    rendered. The specials that are whole in the rendered text are then the template's own; the text between them is
    encoded as ordinary text, without the marks.
    """

    def __init__(self, specials: SpecialTexts, chat: ChatPrompt) -> None:
        self._specials = specials
        self._chat = chat
        written = [text for value in (chat.messages, chat.variables, chat.tools) for text in _texts(value)]
        self.is_needed = any(map(specials.are_in, written))
        characters = frozenset().union(*written) if self.is_needed else frozenset()
        mark = next((mark for mark in map(chr, _MARKS) if mark not in characters), None)
        if mark is None:
            raise InvalidRequest("messages must not have all characters for private use", field="messages")
        self._mark = mark

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
        """Yields the rendered text in order, without the marks: (text, whether it is a special token)."""
        at = 0
        for special in self._specials.pattern.finditer(rendered):
            if special.start() > at:
                yield rendered[at : special.start()].replace(self._mark, ""), False
            yield special[0], True
            at = special.end()
        if at < len(rendered):
            yield rendered[at:].replace(self._mark, ""), False

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            marked = self._marked_inside(value)
            end = len(marked.rstrip())
            return marked[:end] + self._mark + marked[end:] if self._specials.may_begin(marked) else marked
        if isinstance(value, Mapping):
            return {self._marked_inside(key): self._marked(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._marked, value))
        return value

    def _marked_inside(self, text: str) -> str:
        return self._specials.pattern.sub(lambda special: special[0][0] + self._mark + special[0][1:], text)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the texts, the first one that fits. Without texts, it matches nothing."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _texts(value: Any) -> Iterator[str]:
    """Yields all strings in a value of JSON, in any order and from any depth."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            yield from one
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one


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
    """Replaces Jinja's own filter, which writes HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """Ignores the tag `{% generation %}`, which marks the assistant's words for training, and renders its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


DEFAULT, TOOL_USE = "default", "tool_use"


class ChatTemplates:
    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        """`sources`: templates by name. A single template is the default, whatever its name."""
        self._templates = {name: ChatTemplate(source, special_tokens) for name, source in sources.items()}
        default = DEFAULT if DEFAULT in sources or len(sources) != 1 else next(iter(sources))
        self._default = self._templates.get(default)
        self._tool_use = self._templates.get(TOOL_USE, self._default)

    @property
    def source(self) -> str:
        """The source of the templates that are rendered unless a chat names another one."""
        return "\n".join(each.source for each in (self._default, self._tool_use) if each is not None)

    def render(self, chat: ChatPrompt) -> str:
        """Returns the text of the prompt. Raises InvalidRequest if the template refuses the messages or is unknown."""
        return self._template_of(chat).render(chat)

    def _template_of(self, chat: ChatPrompt) -> ChatTemplate:
        if chat.template:
            if chat.template not in self._templates:
                raise unknown_template(chat.template, self._templates)
            return self._templates[chat.template]
        template = self._tool_use if chat.tools else self._default
        if template is None:
            names = ", ".join(sorted(self._templates))
            raise InvalidRequest(
                f"chat_template must name one of this model's templates, which are {names}: none is the default",
                field="chat_template",
            )
        return template


def unknown_template(name: str, known: Iterable[str]) -> UnsupportedFeature:
    names = ", ".join(sorted(known)) or "without names"
    return UnsupportedFeature(
        f"chat_template: {shown(name)} is none of this model's templates, which are {names}; a template's text is not "
        "taken from requests",
        field="chat_template",
    )


def load_templates(directory: Path) -> ChatTemplates | None:
    """Reads the templates as transformers does: files win over tokenizer_config.json. None: there are none."""
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = {**_special_tokens(_read_json(directory / "special_tokens_map.json")), **_special_tokens(config)}
    sources = _in_files(directory) or _in_config(config.get("chat_template"))
    return ChatTemplates(sources, special_tokens) if sources else None


def _in_files(directory: Path) -> dict[str, str]:
    files = {file.stem: file for file in sorted((directory / TEMPLATES).glob("*.jinja"))}
    if (default := directory / "chat_template.jinja").is_file():
        files.setdefault(DEFAULT, default)
    return {name: file.read_text(encoding="utf-8") for name, file in files.items()}


def _in_config(value: Any) -> dict[str, str]:
    """Returns templates of tokenizer_config.json: a text, a list of names and templates, or an object of them."""
    if isinstance(value, str):
        return {DEFAULT: value} if value else {}
    if isinstance(value, Mapping):
        value = [{"name": name, "template": template} for name, template in value.items()]
    entries = value or []
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ConfigError(
            "chat_template in tokenizer_config.json must be a text, or a list of objects with name and template",
            field="model_dir",
        )
    return {entry["name"]: entry["template"] for entry in entries}


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(entry.get(part), str) for part in ("name", "template"))


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}", field="model_dir") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns bos_token, eos_token and so on, written as a string, or an object with its content."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
