"""Finds models that no GPU computes before weights are loaded. Launchers ask where --device names a GPU. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig
from twostroke.models.spec import ModelSpec

PLAIN: Final[Mapping[str, Any]] = {"generic": None, "latents": None}
"""Fields of a spec, with their values in models that devices compute."""


def check_on_gpus(spec: ModelSpec, model: ModelConfig, *, has_codes: bool) -> None:
    """Raises ConfigError where workers of either role cannot compute a model. `has_codes`: its files are quantised."""
    check_computed(spec)
    for flag, ranks in model.ranks_by_flag:
        check_shared_out(flag, ranks, has_codes=has_codes)


def check_computed(spec: ModelSpec) -> None:
    """Raises ConfigError for models that only CPUs compute."""
    facts = dataclasses.asdict(dataclasses.replace(spec, ropes=()))
    differing = [name for name, value in PLAIN.items() if facts[name] != value]
    if differing:
        raise ConfigError(
            f"--device cuda does not compute {spec.architecture} ({', '.join(differing)}); use --device cpu",
            field="device",
        )


def check_shared_out(flag: str, ranks: int, *, has_codes: bool) -> None:
    """Raises ConfigError where the weights cannot be divided among ranks on GPUs. `flag` sets the number of ranks."""
    if ranks > 1 and has_codes:
        raise ConfigError(
            f"{flag} {ranks}: quantised weights are shared out over ranks on CPUs only: give --device cpu, or "
            "take plain ones",
            field=flag,
        )
