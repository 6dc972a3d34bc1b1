"""The sampling that a model's makers recommend for chats, as its directory or the catalogue says. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from twostroke.base.errors import InvalidRequest
from twostroke.request import SamplingParams

MOST_TOP_K = (1 << 32) - 1
"""The largest top_k that a message can carry."""
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """Recommended sampling parameters. None: nothing is recommended."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}


UNKNOWN = Recommended()


def read_recommended(directory: Path, usual: Recommended) -> Recommended:
    """Returns what the model's generation_config.json recommends, or `usual` if it has no sampling parameters."""
    try:
        config = json.loads((directory / GENERATION_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return usual
    if not isinstance(config, dict):
        return usual
    found = {name: _number(name, config.get(name)) for name in asdict(usual)}
    recommended = Recommended(**found)  # type: ignore[arg-type]  # a whole number where it is one
    return recommended if recommended.given() else usual


def _number(name: str, value: object) -> float | None:
    """Returns a number, or None where it is not a number or not allowed in requests. 0 as `top_k` means all tokens, as
    None does.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    number = int(value) if isinstance(value, float) and value.is_integer() and name == "top_k" else value
    if name == "top_k" and (not isinstance(number, int) or number > MOST_TOP_K):
        return None
    try:
        SamplingParams(seed=0, max_tokens=1, **{name: number})  # type: ignore[arg-type]  # of every parameter's type
    except InvalidRequest:
        return None
    return number
