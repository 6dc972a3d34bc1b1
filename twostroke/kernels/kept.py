"""Facts about a machine that are measured once: kept in a file that all processes of a user share."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def kept_or_measured(path: Path, key: str, measure: Callable[[], Any]) -> Any:
    """What the file keeps under `key`; else what `measure` returns, which JSON must hold, and which is kept then.

    One process measures at a time, and the others wait for it. Raises OSError where the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        found = _read(file.read())
        if key not in found:
            found[key] = measure()
            file.truncate(0)
            file.write(json.dumps(found))
        return found[key]


def kept(path: Path, key: str) -> Any | None:
    """Return what the file keeps under `key`; None where that was never measured."""
    try:
        return _read(path.read_text(encoding="utf-8")).get(key)
    except (OSError, UnicodeDecodeError):
        return None


def _read(text: str) -> dict[str, Any]:
    """Return what was measured before; nothing where the file is new, or a machine went down while it was written."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
