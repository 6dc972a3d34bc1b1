"""What a backend has loaded: page memory, a runner, and what else the worker asks of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from twostroke.base.errors import EngineLost
from twostroke.engine.backends.facts import LoadedModel
from twostroke.engine.determinism import Determinism
from twostroke.engine.extras import Offers
from twostroke.engine.memory_use import MemoryUse, pages_use
from twostroke.kv_cache.memory import Pages
from twostroke.models.expert_load import ExpertLoad
from twostroke.scheduler.batch import Runner
from twostroke.scheduler.lateness import WaitingPrompts


@dataclass(frozen=True, slots=True)
class KernelsInUse:
    """What computes the steps of a worker on a CPU."""

    variant: str
    """The build of the native kernels, or torch."""
    reason: str
    """Why this one."""
    threads: int
    """Threads of the worker's own, in all processes."""
    ranks: int = 1
    """Processes that compute together."""


class Neighbours(Protocol):
    """The other workers of a host. Their cores may be borrowed."""

    def tell_prompts(self, prompts: WaitingPrompts) -> None:
        """Tells them which prompts wait here."""

    def prompts_beside(self) -> WaitingPrompts:
        """Returns the prompts that wait there and would be computed sooner with cores of this worker."""

    def measuring(self) -> AbstractContextManager[None]:
        """Waits until no other worker measures. After some seconds it measures at the same time."""

    def lend(self) -> None:
        """Lets them borrow this worker's cores at once: it runs no step for a while."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    model: LoadedModel
    memory: Pages
    runner: Runner
    determinism: Determinism
    neighbours: Neighbours | None = None
    """Workers that this one lends its cores to and borrows from, if it has any use for that."""
    kernels: KernelsInUse | None = None
    """None where a device computes, or nothing does."""
    offers: Offers = field(default_factory=dict)
    weights: MemoryUse | None = None
    """None for a paced model, which has none."""
    expert_load: ExpertLoad | None = None
    """How much each expert had to do; None for a model without experts."""
    lost: Future[EngineLost] | None = None
    """Is done when a part of the engine that no step waits for is lost; None where that cannot be."""

    @property
    def memory_use(self) -> tuple[MemoryUse, ...]:
        """Returns what was predicted and what is measured, part by part."""
        return (pages_use(self.memory), *([] if self.weights is None else [self.weights]))

    def close(self) -> None:
        """Closes both. A runner on an engine thread is closed by that thread; then only `memory` is left to close."""
        self.runner.close()
        self.memory.close()


@contextmanager
def closed_on_error(memory: Pages) -> Iterator[None]:
    """Closes the page memory of an engine that cannot be loaded within."""
    try:
        yield
    except BaseException:
        memory.close()
        raise
