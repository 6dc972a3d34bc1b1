"""Writes a command's results for programs: to a file, to standard output, or nowhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cluster.flags.checks import STDOUT, file_can_be_made
from twostroke.base.errors import ConfigError
from twostroke.config.settings import Settings, setting


class JsonFile(Settings):
    """The JSON that is written in addition to the printed output."""

    json_path: str | None = setting(None, flag="--json", unit="FILE", help='also as JSON; "-": to standard output')

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)


class ReportFiles(JsonFile):
    """The JSON and the page that are written in addition to the printed output."""

    html_path: str | None = setting(
        None, flag="--html", unit="FILE", help="also as a page with figures, which needs no network"
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        page_can_be_made(self.html_path)


def page_can_be_made(path: str | None) -> None:
    """Checks that the page can be written. Raises ConfigError, or ModuleNotFoundError without matplotlib."""
    file_can_be_made("--html", path)
    if path is not None:
        import matplotlib.figure  # noqa: F401


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
            Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")  # file names may be any bytes
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
