"""What the flags of benchmarks have in common."""

from __future__ import annotations

from typing import Any

from twostroke.config.settings import setting


def json_file() -> Any:
    """Declare `--json`. The class checks the file with `file_can_be_made`."""
    return setting(None, flag="--json", unit="FILE", help='write the results there, too; "-": to standard output')
