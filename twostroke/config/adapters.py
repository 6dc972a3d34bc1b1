"""LoRA adapters: which may be loaded, from where, and how many a worker keeps. The names are vLLM's."""

from __future__ import annotations

import os
from typing import Any

from twostroke.base.errors import ConfigError
from twostroke.config.settings import Settings, setting

MOST_NAME_CHARS = 200


class AdapterConfig(Settings):
    lora_modules: tuple[str, ...] = setting(
        (),
        unit="NAME=FOLDER",
        help="serve the LoRA adapter in this folder under this name; any number of times",
        default_text="none",
    )
    allow_runtime_lora_updating: bool = setting(
        False, help="adapters may be loaded and unloaded while it serves, by the cluster's token"
    )
    """Whoever may do that decides what clients of a name get."""
    lora_dirs: tuple[str, ...] = setting(
        (),
        is_path=True,
        unit="FOLDER",
        help="adapters may be loaded at run time from below this folder; any number of times",
        default_text="none",
    )
    max_loras: int = setting(
        16, least=1, help="most adapters that a worker keeps loaded; the least recently used makes room"
    )
    max_lora_rank: int = setting(64, least=1, most=512, unit="RANK", help="highest rank of an adapter")

    def model_post_init(self, _context: Any) -> None:
        names = [name for name, _ in self.modules]
        if len(set(names)) != len(names):
            raise ConfigError("--lora-modules names an adapter twice", field="--lora-modules")

    @property
    def are_served(self) -> bool:
        """Whether workers may have to compute any."""
        return bool(self.lora_modules) or self.allow_runtime_lora_updating

    @property
    def modules(self) -> tuple[tuple[str, str], ...]:
        """Returns (name, folder) of each adapter that is served from the start. Raises ConfigError."""
        found = []
        for module in self.lora_modules:
            name, _, folder = module.partition("=")
            if not name or not folder or len(name) > MOST_NAME_CHARS or not name.isprintable():
                raise ConfigError(f"--lora-modules must be NAME=FOLDER, got {module!r}", field="--lora-modules")
            found.append((name, os.path.abspath(folder)))
        return tuple(found)
