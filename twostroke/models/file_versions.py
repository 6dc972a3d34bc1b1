"""Notices whether a model's files were replaced while it was loaded. No torch here.

Weights are mapped, so their bytes cannot be read once for all that is made of them: they are digested by one thread and
packed by another. So a reader notes the versions of all files first, and checks at the end whether they are the same.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from twostroke.base.errors import ConfigError

READ_SUFFIXES: Final = frozenset({".safetensors", ".gguf", ".jinja", ".model", ".tiktoken"})
READ_TEXTS: Final = frozenset(
    {
        *("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("chat_template.json", "vocab.json", "vocab.txt", "merges.txt"),
    }
)
"""Files of a model's directory that anything is read from. Other files may be logs and results that are being written.
"""
TICK_S: Final = 0.02
"""Seconds, longer than a tick of a file system's clock. Two changes within one tick leave the same time of change."""

LOOKS: Final = 5
"""Most looks that wait for a change to be a tick ago. A file that is written all the time never gets there, but its
next change is noticed at the end."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """The identity of a file's content. It differs once the file has been written to, or another file has taken its
    name."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """The system's own time of the last change: no program can set it."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Returns the version of the file that a path leads to. Raises OSError where there is none."""
        return cls.from_status(str(path), path.stat())

    @classmethod
    def from_status(cls, path: str, status: os.stat_result) -> Self:
        return cls(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class FileVersions:
    """The versions of a directory's files at one time."""

    directory: Path
    files: tuple[FileVersion, ...]
    """Versions of the files that anything is read from, by path."""
    names: tuple[str, ...] | None = None
    """The names of those files. None: all of READ_TEXTS and READ_SUFFIXES."""
    field: str = "model"
    """The field that an error names."""

    @classmethod
    def now(cls, directory: Path, names: tuple[str, ...] | None = None, *, field: str = "model") -> Self:
        """Returns the present versions. It waits until the latest change is a tick ago, so that a later one has another
        time."""
        files = _look(directory, names)
        for _ in range(LOOKS):
            age_s = (time.time_ns() - max((file.ctime_ns for file in files), default=0)) / 1e9
            if not 0 <= age_s < TICK_S:
                break
            time.sleep(TICK_S - age_s)
            files = _look(directory, names)
        return cls(directory, files, names, field)

    def check_unchanged(self) -> None:
        """Raises ConfigError naming a file that was changed, added or removed since."""
        changed = {file.path for file in {*self.files} ^ {*_look(self.directory, self.names)}}
        if changed:
            raise changed_while_read(changed, self.field)


def changed_while_read(paths: Collection[str], field: str = "model") -> ConfigError:
    """Returns the error for a changed file."""
    first, more = min(paths), f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return ConfigError(
        f"{first}{more} changed while it was read, so that what was loaded is of two versions; "
        "start again when nobody writes there",
        field=field,
    )


@contextlib.contextmanager
def unchanged(directory: Path, names: tuple[str, ...] | None = None, *, field: str = "model") -> Iterator[FileVersions]:
    """Checks that no file changes while the body reads it. Raises ConfigError where one did, unless the body has
    raised."""
    versions = FileVersions.now(directory, names, field=field)
    yield versions
    versions.check_unchanged()


def _is_read(path: Path) -> bool:
    return path.suffix in READ_SUFFIXES or path.name in READ_TEXTS


def _look(directory: Path, names: tuple[str, ...] | None) -> tuple[FileVersion, ...]:
    if names is None:
        paths = sorted(path for path in directory.iterdir() if _is_read(path))
    else:
        paths = [directory / name for name in names]
    found = []
    for path in paths:
        with contextlib.suppress(OSError):  # missing, or removed meanwhile: reading it raises the error
            found.append(FileVersion.of(path))
    return tuple(found)
