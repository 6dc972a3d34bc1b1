"""The API key of whoever calls these commands, from the environment: command lines are for all to read."""

from __future__ import annotations

import os

VARIABLE = "TWOSTROKE_API_KEY"


def own() -> str:
    """Empty where there is none."""
    return os.environ.get(VARIABLE, "").strip()


def shown(key: str) -> dict[str, str]:
    """As an HTTP header, or as metadata of a call."""
    return {"authorization": f"Bearer {key}"} if key else {}
