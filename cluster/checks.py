"""What flags of several commands must satisfy. Each check raises ConfigError that names the flag."""

from __future__ import annotations

import math
import os
from pathlib import Path

from twostroke.errors import ConfigError

STDOUT = "-"


def positive(flag: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{flag} must be positive, got {value:g}", field=field_of(flag))


def at_least_zero(flag: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{flag} must be at least 0, got {value:g}", field=field_of(flag))


def file_can_be_made(flag: str, path: str | None) -> None:
    """Before hours of measuring, not after."""
    if path is None or path == STDOUT:
        return
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: the directory does not exist", field=field_of(flag))
    if Path(path).is_dir():
        raise ConfigError(f"{flag} {path}: is a directory", field=field_of(flag))
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: may not be written", field=field_of(flag))


def is_host_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


def field_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
