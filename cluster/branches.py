"""The table of models that workers load besides the one that they serve: one line for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cluster.drafts import ClusterDraftModel
from twostroke.config import ClusterConfig, WorkerConfig


class FurtherModel(Protocol):
    """What a launch and the workers ask of such a model. Nothing happens where the config names none."""

    def with_absolute_path(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with the absolute path of the model's files, where it names them by a path."""

    def fetch_and_check(self, config: ClusterConfig, model_dir: Path, fetch: Callable[[str, str], Path]) -> None:
        """Fetches it where this machine lacks it, and checks it beside the served model, which is in a directory.

        Raises ConfigError.
        """

    def check_memory(self, config: ClusterConfig, free_bytes: int) -> None:
        """Raises ConfigError where what the workers hold for it is more than this machine has free."""

    def loaded_by(self, config: WorkerConfig) -> list[str]:
        """Returns the names of those that one worker loads."""


FURTHER_MODELS: tuple[FurtherModel, ...] = (ClusterDraftModel(),)
