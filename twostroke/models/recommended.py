"""The sampling that a model's makers recommend for chats, as its directory or the catalogue says. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """None: nothing is recommended."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def said(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}


UNKNOWN = Recommended()


def read_recommended(directory: Path, usual: Recommended) -> Recommended:
    """As the model's generation_config.json says; where that says nothing of sampling, `usual`."""
    try:
        config = json.loads((directory / GENERATION_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return usual
    if not isinstance(config, dict):
        return usual
    numbers = {name: config[name] for name in asdict(usual) if _is_number(config.get(name))}
    return Recommended(**numbers) if numbers else usual


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
