"""The port of a worker's branches: what a feature may give the worker that it is wired into.

Each role has one table (`decode_worker/branches.py`, `prefill_worker/branches.py`), with one line for a branch. The
worker asks all branches of its table, and knows none of them. With an empty table it still serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Protocol

from twostroke.base.errors import UnsupportedFeature
from twostroke.base.ids import BlockHash, PageId, SessionId
from twostroke.config import WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.loop import EngineThread
from twostroke.kv_cache.memory import Pages
from twostroke.kv_cache.parts import GroupKind
from twostroke.request import Attempt, WeightsRef
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import control_pb2
from twostroke.scheduler.batch import Batch, StepResult
from twostroke.scheduler.branches import ClaimGate, Extension, OpenGate, SchedulerBranches, SharedConstraint
from twostroke.scheduler.cost import Queued
from twostroke.scheduler.reading import InlineReadings, ReadingRunner
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Constraint, Sequence
from twostroke.scheduler.values import SchedulerLimits
from twostroke.transfer.base import Identity
from twostroke.worker.answers import AnswerBranch
from twostroke.worker.condition import Condition
from twostroke.worker.engine_state import EngineState, LoadedBranch
from twostroke.worker.event_feed import EventFeed
from twostroke.worker.measured.rates import Rates
from twostroke.worker.pull_ends import LandingInOtherForm, ServedInOtherForm
from twostroke.worker.request_validator import RequestValidator
from twostroke.worker.role_host import Loop, RoleHandlers, RoleHost
from twostroke.worker.supply.supply import Supplier


class BranchLoop(Loop, Protocol):
    @property
    def rates(self) -> Rates: ...


class BranchHost(RoleHost, Protocol):
    """The worker as its branches see it. Some parts exist only once the scheduler has been made."""

    @property
    def engine_state(self) -> EngineState: ...
    @property
    def engine(self) -> EngineThread: ...
    @property
    def memory(self) -> Pages: ...
    @property
    def validator(self) -> RequestValidator: ...
    @property
    def feed(self) -> EventFeed: ...
    @property
    def loop(self) -> BranchLoop: ...
    @property
    def progress(self) -> Condition: ...
    def wake(self) -> None:
        """Wakes the work loop."""

    def compute_s(self, queued: Queued) -> float:
        """Returns the seconds of computing prompts here beside the current streams."""


class WaitingGate(ClaimGate, Protocol):
    async def ready(self, session: SessionId, hashes: ListOf[BlockHash], private: int) -> None:
        """Waits until a claim may be made."""


class Prefetching(Protocol):
    """Prepares what sequences that wait will need."""

    @property
    def admits_beside_steps(self) -> bool:
        """Whether sequences may be admitted while a step runs: not where loads are weighed against the next step."""

    def begin_admission(self, waiting: ListOf[Sequence]) -> None:
        """Called before sequences are admitted, with the waiting ones that admission tries."""

    def end_admission(self, running: int) -> None:
        """Called when loads and pulls of those that were admitted have begun."""


class BetweenSteps(Protocol):
    """Work between two steps, which the next one waits for."""

    def begin(self) -> Awaitable[None] | None:
        """Begins the work, and returns an awaitable that ends with it; None if there is nothing to do."""


class LowerPages(Protocol):
    """Pages in the memories below the pool, for pulls by other workers."""

    def share(self, group: GroupKind, hashes: ListOf[BlockHash], blocks: ListOf[int]) -> dict[int, PageId]:
        """Holds and loads pages of a group. The caller releases them, and then calls `give_up_unwanted`."""

    def give_up_unwanted(self) -> None:
        """Gives up loads for which nothing waits any more."""


class StepStarter(Protocol):
    """Runs steps on an engine thread."""

    def start(self, batch: Batch) -> Awaitable[StepResult]: ...


@dataclass(frozen=True, slots=True)
class SecondModel:
    """Another model that computes on this worker, whose steps are measured before the worker serves."""

    name: str
    steps: StepStarter
    rates: Rates
    max_model_len: int
    pages: int


class Branch:
    """One feature in one epoch of a worker. What it does not override has no effect."""

    prefetch: Prefetching | None = None
    gate: WaitingGate | None = None
    """Lets claims of pages wait."""
    below: LowerPages | None = None
    readings: ReadingRunner | None = None
    """Runs the work of answers' readers."""
    second_models: ListOf[SecondModel] = ()
    served: ServedInOtherForm | None = None
    landing: LandingInOtherForm | None = None
    """The puller's end of pulls between workers of two page forms. `served` is the source's end."""
    answers: AnswerBranch | None = None
    """Makes the feature of single answers. None: it has none."""

    @staticmethod
    def load(config: WorkerConfig, built: BuiltEngine) -> LoadedBranch | None:
        """Loads what is kept until the process ends; called on a thread. None: nothing. Raises ConfigError."""
        return None

    @classmethod
    def mount(cls, host: BranchHost, loaded: LoadedBranch | None) -> Branch | None:
        """Returns the branch of an epoch, before the scheduler is made. None: this worker does not use it."""
        return cls(host)

    def __init__(self, host: BranchHost) -> None:
        self.host = host

    # What the scheduler and the work loop get

    def shared(self, limits: SchedulerLimits) -> tuple[SharedConstraint, ...]:
        return ()

    def extension(self, limits: SchedulerLimits) -> Extension | None:
        return None

    def between_steps(self, scheduler: Scheduler, limits: SchedulerLimits) -> BetweenSteps | None:
        return None

    def handlers(self, role: RoleHandlers) -> RoleHandlers:
        """Returns the handlers of the work loop's events, which pass the role's events on to `role`."""
        return role

    # What single sequences get

    def suppliers_of(self, sequence: Sequence) -> ListOf[Supplier]:
        """Returns suppliers on this worker, which are tried before other workers."""
        return ()

    def constraints_of(self, weights: WeightsRef) -> tuple[Constraint, ...]:
        """Returns the constraints of a sequence that is computed with these weights."""
        return ()

    def opened(self, attempt: Attempt) -> None:
        """Takes note of a request with hints for the cache."""

    # While the worker serves

    async def open(self, identity: Identity) -> None:
        """Lets other workers of this identity read pages, before the worker serves."""

    def serve(self, rpc: RpcServer, tasks: asyncio.TaskGroup) -> None:
        """Adds its rpc services. `tasks` end with the worker."""

    def watching(self, handlers: RoleHandlers) -> Iterable[Callable[[], Awaitable[object]]]:
        """Returns coroutine functions that run while the worker serves. They may raise EngineLost."""
        return ()

    def draining(self) -> None:
        """Begins nothing new from now on: the worker drains, or ends."""

    def stop(self) -> None:
        """Ends its work: the worker takes no more calls."""

    async def close(self) -> None:
        """Frees what the epoch has; called after `stop`."""

    async def shut(self) -> None:
        """Undoes `open`. It is called after the worker's page transports are closed: a hanging device may block it."""

    def add_to_load(self, load: control_pb2.Load) -> None:
        """Adds its part to a report of the worker's load."""

    def forget_cached(self) -> int:
        """Forgets its cached blocks; returns how many blocks had a page."""
        return 0


BranchTable = tuple[type[Branch], ...]
"""The branches of a role, in the order in which they are called."""


class Branches:
    """All branches of one epoch of a worker, combined."""

    def __init__(self, each: Iterable[Branch] = ()) -> None:
        self.each = tuple(each)
        self.gate: WaitingGate = next((each.gate for each in self.each if each.gate), _Open())
        self.below = next((each.below for each in self.each if each.below), None)
        self.served = next((each.served for each in self.each if each.served), None)
        self.landing = next((each.landing for each in self.each if each.landing), None)
        self.second_models = [model for each in self.each for model in each.second_models]
        self.answers = tuple([each.answers for each in self.each if each.answers is not None])
        self._prefetch = [each.prefetch for each in self.each if each.prefetch is not None]

    @classmethod
    def of(cls, table: BranchTable, host: BranchHost) -> Branches:
        mounted = [kind.mount(host, host.engine_state.loaded.get(kind)) for kind in table]
        return cls(branch for branch in mounted if branch is not None)

    def for_scheduler(self, limits: SchedulerLimits) -> SchedulerBranches:
        shared = [constraint for each in self.each for constraint in each.shared(limits)]
        extensions = [each.extension(limits) for each in self.each]
        readings = next((each.readings for each in self.each if each.readings), InlineReadings())
        return SchedulerBranches(tuple(shared), next(filter(None, extensions), None), readings)

    def between_steps(self, scheduler: Scheduler, limits: SchedulerLimits) -> BetweenSteps | None:
        return next(filter(None, [each.between_steps(scheduler, limits) for each in self.each]), None)

    def handlers(self, role: RoleHandlers) -> RoleHandlers:
        for each in self.each:
            role = each.handlers(role)
        return role

    @property
    def admits_beside_steps(self) -> bool:
        return all(each.admits_beside_steps for each in self._prefetch)

    def begin_admission(self, waiting: ListOf[Sequence]) -> None:
        for each in self._prefetch:
            each.begin_admission(waiting)

    def end_admission(self, running: int) -> None:
        for each in self._prefetch:
            each.end_admission(running)

    def suppliers_of(self, sequence: Sequence) -> ListOf[Supplier]:
        return [supplier for each in self.each for supplier in each.suppliers_of(sequence)]

    def constraints_of(self, weights: WeightsRef | None) -> tuple[Constraint, ...]:
        """Returns the constraints of a sequence with these weights, if any. Raises UnsupportedFeature."""
        if weights is None:
            return ()
        constraints = [constraint for each in self.each for constraint in each.constraints_of(weights)]
        if not constraints:
            raise UnsupportedFeature("weights: this worker was started without the branch for them", field="model")
        return tuple(constraints)


class _Open(OpenGate):
    async def ready(self, session: SessionId, hashes: ListOf[BlockHash], private: int) -> None:
        """Returns at once."""
