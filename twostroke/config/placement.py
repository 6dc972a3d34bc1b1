"""What a role's workers ask of the Ray nodes that they run on, and the ports that they listen on there."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from twostroke.base.errors import ConfigError
from twostroke.config.settings import Settings, port

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_NAME}")
_LABEL_VALUE = re.compile(rf"!?{_NAME}|!?in\(\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\)")
"""A value, one of several, or none of them, as Ray's label selectors say it."""


MOST_THREADS = 4096
"""Compute threads of one worker: no host has more cores. This one's are counted where they are used."""


class RoleConfig(Settings):
    """What each worker of one role asks for."""

    threads: int | None = None
    """Compute threads. None: as all workers."""
    num_cpus: float = 0.0
    """CPUs of the node, as Ray counts them. 0: as many workers as there are fit onto any node."""
    num_gpus: float | None = None
    """GPUs of the node. None: the GPUs that there are are shared out among all workers."""
    memory_bytes: int | None = None
    """Memory of the node, as Ray counts it. None: it is not counted."""
    custom: Mapping[str, float] = Field(default_factory=dict)
    """Ray's custom resources."""
    labels: Mapping[str, str] = Field(default_factory=dict)
    """Labels of the node: it has all of them, or gets no such worker."""
    prefer_labels: Mapping[str, str] = Field(default_factory=dict)
    """Labels of the node, if there is such a one with room. Neither these nor `labels`: `role` as the worker's,
    preferred."""

    def model_post_init(self, _context: Any) -> None:
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise ConfigError(f"threads must be from 1 to {MOST_THREADS}, got {self.threads}", field="threads")
        _check_amount("resources.num_cpus", self.num_cpus)
        if self.num_gpus is not None:
            _check_amount("resources.num_gpus", self.num_gpus)
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigError(
                f"resources.memory must be more than 0, got {self.memory_bytes}", field="resources.memory"
            )
        for name, amount in self.custom.items():
            _check_amount(f"resources.{name}", amount)
        for path, labels in (("labels", self.labels), ("prefer_labels", self.prefer_labels)):
            for key, value in labels.items():
                _check_label(f"{path}.{key}", key, value)

    @property
    def resources(self) -> dict[str, float]:
        """The amounts by the names that Ray's nodes have for them."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus or 0.0, "memory": float(self.memory_bytes or 0)}
        return {name: amount for name, amount in (named | dict(self.custom)).items() if amount}


def _check_amount(path: str, amount: float) -> None:
    if not 0 <= amount < math.inf:
        raise ConfigError(f"{path} must be 0 or more, got {amount}", field=path)
    if amount > 1 and amount != int(amount):  # Ray shares out one, not several
        raise ConfigError(f"{path} must be a whole number where it is more than 1, got {amount}", field=path)


def _check_label(path: str, key: str, value: str) -> None:
    if not _LABEL_KEY.fullmatch(key):
        raise ConfigError(f"{key!r} is not a label of a Ray node; write for example role or my.domain/zone", field=path)
    if not _LABEL_VALUE.fullmatch(value):
        raise ConfigError(
            f"{value!r} is not a value of a label; write for example prefill, !spot, in(a100, h100) or !in(a, b)",
            field=path,
        )


_ONE_PER_NODE = "of every worker: for one worker per node or pod, where firewalls name it"


class WorkerPorts(Settings):
    rpc: int = port(flag="--worker-rpc-port", key="ports.rpc", help=f"rpc port {_ONE_PER_NODE}")
    pages: int = port(flag="--worker-pages-port", key="ports.pages", help=f"port for pages over tcp {_ONE_PER_NODE}")
    converted: int = port(
        flag="--worker-converted-pages-port",
        key="ports.converted",
        help=f"port for converted pages over tcp {_ONE_PER_NODE}",
    )
    metrics: int = port(
        flag="--worker-metrics-port", key="ports.metrics", help=f"port of Prometheus metrics {_ONE_PER_NODE}"
    )

    def model_post_init(self, _context: Any) -> None:
        fixed = [number for number in (self.rpc, self.pages, self.converted, self.metrics) if number]
        if len(set(fixed)) < len(fixed):
            raise ConfigError(f"the worker's ports must differ, got {sorted(fixed)}", field="ports")

    @property
    def are_fixed(self) -> bool:
        return bool(self.rpc or self.pages or self.converted or self.metrics)
