"""The interface of a backend: it makes a plan from a worker's config, and loads an engine from the plan.

A plan is a frozen value: the bytes of each process and the pages. Making one touches no device and claims no memory, so
that whatever cannot be served is refused before anything is loaded. `twostroke bill` shows plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from twostroke.base.errors import EngineLost
from twostroke.config import WorkerConfig
from twostroke.engine.backends.facts import LoadedModel
from twostroke.engine.backends.memory_plan import MemoryPlan, MemoryUse, pages_use
from twostroke.engine.determinism import Determinism
from twostroke.engine.extras import Offers
from twostroke.kv_cache.memory import Pages
from twostroke.models.expert_load import ExpertLoad
from twostroke.observability.profiler import Profiler
from twostroke.scheduler.batch import Runner
from twostroke.scheduler.lateness import WaitingPrompts


@dataclass(frozen=True, slots=True)
class KernelsInUse:
    """What computes the steps of a worker on a CPU."""

    variant: str
    """Name of the native kernels' build, or of torch where it computes."""
    reason: str
    """The reason why this variant was chosen."""
    threads: int
    """The worker's own threads, summed over its processes."""
    ranks: int = 1
    """Number of processes that compute each step together."""


class Neighbours(Protocol):
    """The other workers of a host. Their cores may be borrowed."""

    def tell_prompts(self, prompts: WaitingPrompts) -> None:
        """Tells the other workers which prompts wait at this one."""

    def prompts_beside(self) -> WaitingPrompts:
        """Returns the prompts that wait at other workers and would be computed sooner with cores of this one."""

    def measuring(self) -> AbstractContextManager[None]:
        """Returns a context that waits, for some seconds at most, until no other worker measures."""

    def lend(self) -> None:
        """Lets them borrow this worker's cores at once: it runs no step for a while."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    model: LoadedModel
    memory: Pages
    runner: Runner
    determinism: Determinism
    neighbours: Neighbours | None = None
    """The workers that this one lends cores to and borrows cores from. None where it does neither."""
    kernels: KernelsInUse | None = None
    """What computes on the CPU. None for a device and for a paced model."""
    offers: Offers = field(default_factory=dict)
    weights: MemoryUse | None = None
    """Memory of the weights. None for a paced model, which has no weights."""
    expert_load: ExpertLoad | None = None
    """Tokens that each expert has computed. None for a model without experts."""
    lost: Future[EngineLost] | None = None
    """Completes when a part of the engine is lost that no step waits for. None where that cannot happen."""

    @property
    def memory_use(self) -> tuple[MemoryUse, ...]:
        """Returns the predicted and the measured bytes of each part of the memory."""
        return (pages_use(self.memory), *([] if self.weights is None else [self.weights]))

    def close(self) -> None:
        """Closes runner and memory. A runner on an engine thread is closed by that thread; then only `memory` is left
        to close."""
        self.runner.close()
        self.memory.close()


class BackendPlan(Protocol):
    """The plan of one worker."""

    @property
    def memory(self) -> MemoryPlan:
        """The worker's bytes and pages."""


Plan = TypeVar("Plan", bound=BackendPlan)


class Backend(Protocol[Plan]):
    """What computes the steps of a worker on one kind of device."""

    def plan(self, config: WorkerConfig) -> Plan:
        """Returns what a worker will hold. Raises ConfigError or UnsupportedModel for what the backend cannot serve."""

    def load(self, plan: Plan, profiler: Profiler | None) -> BuiltEngine:
        """Claims the page memory and loads the weights. Raises ConfigError for what cannot be loaded."""


@contextmanager
def closed_on_error(memory: Pages) -> Iterator[None]:
    """Closes the page memory if the body, which loads an engine over it, raises."""
    try:
        yield
    except BaseException:
        memory.close()
        raise
