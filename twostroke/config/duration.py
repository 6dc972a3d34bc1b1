"""Durations as people write them: 30s, 5m, 1.5h, 7d."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhd])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def duration_s(text: str) -> float:
    """Returns the seconds of a duration. Raises ValueError."""
    matched = _DURATION.fullmatch(text.strip())
    if matched is None:
        raise ValueError(f"not a duration: {text[:40]!r}; write for example 30s, 5m, 1.5h or 7d")
    return float(matched[1]) * _SECONDS[matched[2]]


def duration_text(seconds: float) -> str:
    """Returns a duration in its largest unit, in whole numbers: "5m", "2h"."""
    for unit, size_s in reversed(_SECONDS.items()):
        if seconds >= size_s:
            return f"{seconds / size_s:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"
