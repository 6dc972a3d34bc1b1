"""Which models no GPU computes, known before weights are loaded; launchers ask where --device names a GPU. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from twostroke.config import ModelConfig
from twostroke.errors import ConfigError
from twostroke.models.spec import ModelSpec

PLAIN: Final[Mapping[str, Any]] = {"generic": None, "latents": None}
"""What a spec says of the models that are computed on devices."""


def check_on_gpus(spec: ModelSpec, model: ModelConfig, *, has_codes: bool) -> None:
    """Raise ConfigError where workers of either role cannot compute a model. `has_codes`: its files are quantised."""
    check_computed(spec)
    for flag, ranks in model.ranks_by_flag:
        check_shared_out(flag, ranks, has_codes=has_codes)


def check_computed(spec: ModelSpec) -> None:
    """Raise ConfigError for models that only CPUs compute."""
    facts = dataclasses.asdict(dataclasses.replace(spec, ropes=()))
    differing = [name for name, value in PLAIN.items() if facts[name] != value]
    if differing:
        raise ConfigError(
            f"--device cuda does not compute {spec.architecture} ({', '.join(differing)}); use --device cpu",
            field="device",
        )


def check_shared_out(flag: str, ranks: int, *, has_codes: bool) -> None:
    """Raise ConfigError where ranks on GPUs cannot have their parts of the weights. `flag` says how many they are."""
    if ranks > 1 and has_codes:
        raise ConfigError(
            f"{flag} {ranks}: quantised weights are shared out over ranks on CPUs only: give --device cpu, or "
            "take plain ones",
            field=flag,
        )
