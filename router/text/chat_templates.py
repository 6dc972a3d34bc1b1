"""The chat templates of a model: one, or several by name, and which of them a chat is rendered with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from router.text.chat_template import ChatTemplate
from router.text.prompts import ChatPrompt
from twostroke.base.client_text import shown
from twostroke.base.errors import ConfigError, InvalidRequest, UnsupportedFeature
from twostroke.models.catalog.places import TEMPLATES

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
        """What the templates show that are rendered unless a chat names another one."""
        return "\n".join(each.source for each in (self._default, self._tool_use) if each is not None)

    def render(self, chat: ChatPrompt) -> str:
        """Raises InvalidRequest where the template refuses these messages, or there is no such template."""
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


def _in_config(said: Any) -> dict[str, str]:
    """Returns templates of tokenizer_config.json: a text, a list of names and templates, or an object of them."""
    if isinstance(said, str):
        return {DEFAULT: said} if said else {}
    if isinstance(said, Mapping):
        said = [{"name": name, "template": template} for name, template in said.items()]
    entries = said or []
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
