"""Finds models that no GPU computes, before weights are loaded. Launchers call it where --device names a GPU. No
torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from twostroke.base.errors import ConfigError
from twostroke.models.spec import ModelSpec

PLAIN: Final[Mapping[str, Any]] = {"generic": None, "latents": None}
"""Fields of a spec, with the only values that devices compute."""


def check_computed(spec: ModelSpec) -> None:
    """Raises ConfigError for models that only CPUs compute."""
    facts = dataclasses.asdict(dataclasses.replace(spec, ropes=()))
    differing = [name for name, value in PLAIN.items() if facts[name] != value]
    if differing:
        raise ConfigError(
            f"--device cuda does not compute {spec.architecture} ({', '.join(differing)}); use --device cpu",
            field="device",
        )
