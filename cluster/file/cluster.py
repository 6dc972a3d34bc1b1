"""Turns a file's text into the ClusterConfig that flags would give, or into an error that names its line.

Every setting of `ClusterConfig` is a key of the file; keys without a flag are listed here.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.file.text import FileEntry, parse
from cluster.flags.choices import CHOICES
from twostroke.base.errors import ConfigError
from twostroke.config import ClusterConfig, RoleConfig
from twostroke.config.cache import memory_bytes
from twostroke.config.leaves import Leaf, build, leaves_of
from twostroke.config.settings import KINDS


@dataclass(frozen=True, slots=True)
class ClusterFile:
    config: ClusterConfig
    source: FileSource


@dataclass(frozen=True, slots=True)
class FileSource:
    name: str
    lines: Mapping[str, int]
    """Line of each key that the file has, by its path."""

    def error(self, path: str, why: str) -> ConfigError:
        """Returns an error about a key, or about the section around it where the file does not have the key."""
        here = path
        while here and here not in self.lines:
            here = here.rpartition(".")[0]
        at = f"{self.name}:{self.lines[here]}" if here else self.name
        return ConfigError(f"{at}: {why}", field=path)

    @contextlib.contextmanager
    def naming_lines(self) -> Iterator[None]:
        """Lets a ConfigError within that is about a key say the file and the line."""
        try:
            yield
        except ConfigError as error:
            if error.field is None or error.message.startswith(f"{self.name}:"):
                raise
            why, path = in_words_of_the_file(error.message), path_of(error.field)
            if path not in self.lines:  # an error about several keys may be the fault of another one
                path = next((key for key in self.lines if key in why.replace(",", " ").split()), path)
            raise self.error(path, why if path in why or "." not in path else f"{path}: {why}") from error


def read(path: Path, address: str | None = None) -> ClusterFile:
    """Reads a file. `address` is what the command line says instead of the file's ray.address."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field="-f") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file: {error.reason} at byte {error.start}", field="-f") from error
    return load(text, str(path), address)


def load(text: str, name: str, address: str | None = None) -> ClusterFile:
    whole = parse(text, name)
    if not isinstance(whole.value, dict):
        raise ConfigError(f"{name}:{whole.line}: the file must be sections ({', '.join(known_keys())})")
    entries = dict(_flatten(whole, name))
    source = FileSource(name, {path: entry.line for path, entry in entries.items()})
    values = {
        leaf: _converted(leaf, entries[path], source)
        for path, leaf in leaves().items()
        if path in entries and entries[path].value is not None
    }
    if address is not None:
        values[leaves()["ray.address"]] = address
    with source.naming_lines():
        config = build(ClusterConfig, values)
    prefill, decode = (_role(role, whole.value.get(role), source) for role in ROLES)
    return ClusterFile(config.replace(prefill_role=prefill, decode_role=decode), source)


def _flatten(whole: FileEntry, name: str) -> Iterator[tuple[str, FileEntry]]:
    """Yields sections, and their keys by path. Raises ConfigError for unknown ones."""
    for section, entry in whole.value.items():
        _check_known(section, known_keys(), f"{name}:{entry.line}: ", "")
        yield section, entry
        if entry.value is None:
            continue
        if not isinstance(entry.value, dict):
            raise ConfigError(f"{name}:{entry.line}: {section} must be a section with keys, got {entry.kind}")
        for key, below in entry.value.items():
            _check_known(key, known_keys(section), f"{name}:{below.line}: ", f"{section}.")
            yield f"{section}.{key}", below
            if isinstance(below.value, dict):
                yield from ((f"{section}.{key}.{deep}", entry) for deep, entry in below.value.items())


def _check_known(key: str, known: list[str], where: str, prefix: str) -> None:
    if key in known:
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    advice = f"did you mean {prefix}{near[0]}?" if near else f"known are: {', '.join(known)}"
    raise ConfigError(f"{where}unknown key {prefix}{key}; {advice}", field=f"{prefix}{key}")


def _converted(leaf: Leaf, entry: FileEntry, source: FileSource) -> Any:
    """Converts a value as the flag would."""
    path = leaf.key
    if leaf.setting.is_size:
        return _size(entry, source, path)
    if leaf.is_list and (isinstance(entry.value, list) or not leaf.setting.commas):
        items = entry.value if isinstance(entry.value, list) else [entry]
        return [_typed(item, str, source, path) for item in items]
    value = _typed(entry, leaf.kind, source, path)
    choices = CHOICES.get(leaf.flag, leaf.setting.choices)
    if choices and value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        advice = f"; did you mean {near[0]}?" if near else ""
        raise source.error(path, f"{path} must be one of {', '.join(choices)}, got {value!r}{advice}")
    return value


def _typed(entry: FileEntry, kind: Any, source: FileSource, path: str) -> Any:
    value = entry.value
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool) == isinstance(value, bool)
    if not fits:
        raise source.error(path, f"{path} must be {KINDS[kind]}, got {entry.kind}: {entry.plain()!r}")
    return float(value) if kind is float else value


def _size(entry: FileEntry, source: FileSource, path: str) -> int:
    if isinstance(entry.value, bool) or not isinstance(entry.value, (int, str)):
        raise source.error(path, f"{path} must be a size such as 2GiB, got {entry.kind}: {entry.plain()!r}")
    try:
        return memory_bytes(str(entry.value))
    except ValueError as error:
        raise source.error(path, f"{path}: {error}") from error


def _role(role: str, entry: FileEntry | None, source: FileSource) -> RoleConfig:
    section: dict[str, FileEntry] = (entry.value or {}) if entry is not None else {}
    values: dict[str, Any] = {}
    if (threads := section.get("threads")) is not None and threads.value is not None:
        values["threads"] = _typed(threads, int, source, f"{role}.threads")
    for key in ("labels", "prefer_labels"):
        below = _below(section, role, key, source)
        values[key] = {name: _label(each, source, f"{role}.{key}.{name}") for name, each in below.items()}
    resources = _below(section, role, "resources", source)
    paths = {name: f"{role}.resources.{name}" for name in resources}
    for name in resources:
        if (meant := fixed_resource_meant(name)) is not None:
            raise source.error(paths[name], f"unknown key {paths[name]}; did you mean {role}.resources.{meant}?")
    custom = {
        name: _typed(each, float, source, paths[name])
        for name, each in resources.items()
        if name not in FIXED_RESOURCES
    }
    for name in ("num_cpus", "num_gpus"):
        if name in resources:
            values[name] = _typed(resources[name], float, source, paths[name])
    if "memory" in resources:
        values["memory_bytes"] = _size(resources["memory"], source, paths["memory"])
    try:
        return RoleConfig(custom=custom, **values)
    except ConfigError as error:
        path, key = f"{role}.{error.field}", str(error.field)
        why = error.message.removeprefix(f"{key} ")
        raise source.error(path, f"{path} {why}" if why != error.message else f"{path}: {why}") from error


def _below(section: Mapping[str, FileEntry], role: str, key: str, source: FileSource) -> dict[str, FileEntry]:
    entry = section.get(key)
    if entry is None or entry.value is None:
        return {}
    if not isinstance(entry.value, dict):
        raise source.error(f"{role}.{key}", f"{role}.{key} must be a section with keys, got {entry.kind}")
    below: dict[str, FileEntry] = entry.value
    return below


def _label(entry: FileEntry, source: FileSource, path: str) -> str:
    return str(_typed(entry, str, source, path))


ROLES = ("prefill", "decode")
ROLE_KEYS = ("count", "threads", "resources", "labels", "prefer_labels")
"""Keys of each role's section; `count` is a setting of its own."""
FIXED_RESOURCES = ("num_cpus", "num_gpus", "memory")
"""Resources that Ray has names for. Any other key there is a custom resource."""


@functools.cache
def leaves() -> Mapping[str, Leaf]:
    """Returns the settings by path of their key."""
    return {leaf.key: leaf for leaf in leaves_of(ClusterConfig)}


def fixed_resource_meant(name: str) -> str | None:
    """Returns the resource that a misspelt name means: `cpus` or `GPU` would be custom resources that no node has."""
    if name in FIXED_RESOURCES:
        return None
    plain = name.lower().removesuffix("s")
    named = {"cpu": "num_cpus", "gpu": "num_gpus"}
    near = difflib.get_close_matches(name.lower(), FIXED_RESOURCES, n=1, cutoff=0.85)
    return named.get(plain) or (near[0] if near else None)


def known_keys(prefix: str = "") -> list[str]:
    """Returns the keys directly below `prefix`, or those of the whole file without one."""
    if prefix in ROLES:
        return list(ROLE_KEYS)
    if prefix:
        return [path.partition(".")[2] for path in leaves() if path.partition(".")[0] == prefix]
    return sorted({path.partition(".")[0] for path in leaves()} | set(ROLES))


def in_words_of_the_file(message: str) -> str:
    """Turns an error about a flag into one about the key."""
    by_flag = {leaf.flag: path for path, leaf in leaves().items()}
    return re.sub(r"--[a-z][a-z-]*", lambda matched: by_flag.get(matched[0], matched[0]), message)


def path_of(field: str) -> str:
    """Returns the key that an error's field means, which may be a flag, its name or a path; else the field itself."""
    name = field.removeprefix("--").replace("-", "_")
    return next((path for path, leaf in leaves().items() if name in (path, leaf.name)), field)
