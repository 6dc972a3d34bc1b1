"""The contract of a backend: what it plans of a worker's config, and what it loads of a plan.

A plan is a frozen value: the bytes of each process and the pages. Making one touches no device and claims no memory, so
that whatever cannot be served is refused before anything is loaded. `twostroke bill` shows plans.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from twostroke.config import WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.backends.memory_plan import MemoryPlan
from twostroke.observability.profiler import Profiler


class BackendPlan(Protocol):
    """What a backend plans."""

    @property
    def memory(self) -> MemoryPlan:
        """The worker's bytes and pages."""


Plan = TypeVar("Plan", bound=BackendPlan)


class Backend(Protocol[Plan]):
    """What computes the steps of a worker on one kind of device."""

    def plan(self, config: WorkerConfig) -> Plan:
        """Raises ConfigError or UnsupportedModel for what the backend cannot serve."""

    def load(self, plan: Plan, profiler: Profiler | None) -> BuiltEngine:
        """Claims the page memory and loads the weights. Raises ConfigError for what cannot be loaded."""


def plan_and_load(backend: Backend[Plan], config: WorkerConfig, profiler: Profiler | None) -> BuiltEngine:
    """Loads what the backend plans of a config. Raises ConfigError where a length that is asked for does not fit."""
    plan = backend.plan(config)
    if config.model.max_model_len is not None:
        plan.memory.size.check(config.model.max_model_len)
    return backend.load(plan, profiler)
