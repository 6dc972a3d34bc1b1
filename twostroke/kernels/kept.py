"""Facts about a machine that are measured once: kept in a file that all processes of a user share."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.security.trusted_paths import check_cache, make_folder


def kept_or_measured(path: Path, key: str, measure: Callable[[], Any]) -> Any:
    """Returns what the file has under `key`. Otherwise it returns and keeps what `measure` returns, a value that JSON
    can hold.

    One process measures at a time, and the others wait for it. Raises OSError where the file cannot be written.
    """
    make_folder(path.parent)
    check_cache(path.parent)
    with open(path, "a+", encoding="utf-8", opener=_opened) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        found = _read(file.read())
        if key not in found:
            found[key] = measure()
            file.truncate(0)
            file.write(json.dumps(found))
        return found[key]


def _opened(path: str, flags: int) -> int:
    """Others may not write to it, whatever the umask is: then it would not be believed."""
    return os.open(path, flags, 0o644)


def kept(path: Path, key: str) -> Any | None:
    """Returns what the file keeps under `key`; None where that was never measured."""
    try:
        check_cache(path)
        return _read(path.read_text(encoding="utf-8")).get(key)
    except (OSError, UnicodeDecodeError):
        return None


def _read(text: str) -> dict[str, Any]:
    """Returns what was measured before; nothing where the file is new, or a machine went down while it was written."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
