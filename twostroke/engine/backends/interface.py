"""The contract of a backend: what it plans of a worker's config, and what it loads of a plan.

A plan is a frozen value: the facts about the model, the bytes and the pages. Making one touches no device and claims no
memory, so that whatever cannot be served is refused before anything is loaded.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from twostroke.config import WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.observability.profiler import Profiler

Plan = TypeVar("Plan")


class Backend(Protocol[Plan]):
    """What computes the steps of a worker on one kind of device."""

    def plan(self, config: WorkerConfig) -> Plan:
        """Raises ConfigError or UnsupportedModel for what the backend cannot serve."""

    def load(self, plan: Plan, profiler: Profiler | None) -> BuiltEngine:
        """Claims the page memory and loads the weights. Raises ConfigError for what cannot be loaded."""


def plan_and_load(backend: Backend[Plan], config: WorkerConfig, profiler: Profiler | None) -> BuiltEngine:
    """Loads what the backend plans of a config."""
    return backend.load(backend.plan(config), profiler)
