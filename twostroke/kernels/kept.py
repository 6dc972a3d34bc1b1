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
    """Returns the file's value of `key`. If there is none, it calls `measure` and keeps the result, which must be a
    JSON value.

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
    """Opens a file that other users cannot write to, whatever the umask is. Otherwise it would not be trusted."""
    return os.open(path, flags, 0o644)


def kept(path: Path, key: str) -> Any | None:
    """Returns the file's value of `key`; None where it was never measured."""
    try:
        check_cache(path)
        return _read(path.read_text(encoding="utf-8")).get(key)
    except (OSError, UnicodeDecodeError):
        return None


def _read(text: str) -> dict[str, Any]:
    """Returns all kept values; an empty dict where the file is new, or where the machine crashed while it was
    written."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
