"""Recorded rows as lines of text: read from a file, and taken for JSON. An error names the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError


def lines_of(path: Path, flag: str) -> Iterator[str]:
    """Raises ConfigError naming the flag where there is no such file, and the first line that is no text."""
    field = flag.removeprefix("--")
    try:
        # Whatever is no UTF-8 becomes a surrogate, which no text can be encoded with: so its line is known.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isascii():
                    _check_text(line, f"{path}:{number}", field)
                yield line
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}", field=field) from error


def json_of(line: str, where: str) -> Any:
    """Raises ConfigError naming `where`, and the column if one is known."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error.msg} (column {error.colno})", field="trace") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}", field="trace") from error


def _check_text(line: str, where: str, field: str) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text", field=field) from error
