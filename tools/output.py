"""What a command writes for programs: to a file, to standard output, or nowhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cluster.flags.checks import STDOUT
from twostroke.errors import ConfigError


def write_json(content: dict[str, Any], path: str | None) -> None:
    write_text(json.dumps(content, indent=2) + "\n", path)


def write_text(text: str, path: str | None) -> None:
    """Raises ConfigError where the file cannot be written."""
    if path is None:
        return
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
