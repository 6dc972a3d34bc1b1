"""Reads YAML into values that know their line. Tags, anchors and repeated keys are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from twostroke.base.errors import ConfigError

DEEPEST = 8
"""Deepest nesting of sections; deeper ones attack the stack."""
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp")}

_MERGE = "tag:yaml.org,2002:merge"
_SECOND = "but found another document"
"""Words of PyYAML's error."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A scalar, a list of entries, or a mapping of keys to entries."""

    value: Any
    line: int
    """Line of its key, counted from 1."""

    @property
    def kind(self) -> str:
        if self.value is None:
            return "nothing"
        names = {
            dict: "a section",
            list: "a list",
            str: "text",
            bool: "true or false",
            int: "a number",
            float: "a number",
        }
        return names.get(type(self.value), type(self.value).__name__)

    def plain(self) -> Any:
        """Returns the value without lines."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.plain() for entry in self.value]
        return self.value


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's stubs
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not read here", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def parse(text: str, name: str) -> FileEntry:
    """Parses the whole file. Raises ConfigError `name:line: why`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return FileEntry({}, 1) if node is None else _entry(loader, node, node.start_mark.line + 1, name, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        if error.problem == _SECOND:
            raise ConfigError(f"{name}:{line}: a second document begins: write one file per cluster") from error
        advice = "; quote text that begins with !" if error.context == "while scanning a tag" else ""
        raise ConfigError(f"{name}:{line}: not YAML: {error.problem or error.context}{advice}") from error
    except yaml.YAMLError as error:  # a character that no text has
        raise ConfigError(f"{name}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: too many sections in sections") from error


def _entry(loader: _Loader, node: yaml.Node, line: int, name: str, depth: int) -> FileEntry:
    if depth > DEEPEST:
        raise ConfigError(f"{name}:{line}: too many sections in sections")
    if node.tag not in _TAGS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise ConfigError(f"{name}:{line}: tags ({tag}) are not read here; quote text that begins with !")
    if isinstance(node, yaml.MappingNode):
        return FileEntry(_mapping(loader, node, name, depth), line)
    if isinstance(node, yaml.SequenceNode):
        return FileEntry([_entry(loader, item, item.start_mark.line + 1, name, depth + 1) for item in node.value], line)
    try:
        return FileEntry(loader.construct_object(node), line)
    except ValueError as error:  # a date that no calendar has
        raise ConfigError(f"{name}:{line}: {node.value!r} is not a value: {error}") from error


def _mapping(loader: _Loader, node: yaml.MappingNode, name: str, depth: int) -> dict[str, FileEntry]:
    entries: dict[str, FileEntry] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == _MERGE:
            raise ConfigError(f"{name}:{line}: merge keys (<<) are not read here; write out what they stand for")
        key = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            got = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or a section"
            raise ConfigError(f"{name}:{line}: a key must be a word, got {got}")
        if key in entries:
            raise ConfigError(f"{name}:{line}: {key} was said already, on line {entries[key].line}")
        entries[key] = _entry(loader, value_node, line, name, depth + 1)
    return entries
