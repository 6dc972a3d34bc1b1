"""What the parts of a simulated worker need of it. A part that needs more says so in an interface beside itself."""

from __future__ import annotations

from typing import Protocol

from tools.simulate.fleet.event_queue import EventQueue, VirtualLoop
from tools.simulate.fleet.results import WorkerUse
from tools.simulate.fleet.shape import FleetShape
from twostroke.base.ids import Epoch, SessionId, WorkerId
from twostroke.config import Role, WorkerConfig
from twostroke.engine.backends.facts import LoadedModel
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.cost import Queued
from twostroke.scheduler.scheduler import Scheduler
from twostroke.worker.metrics import WorkerMetrics


class SimulatedWorkerView(Protocol):
    """One epoch of a simulated worker, as its own parts see it."""

    queue: EventQueue
    virtual_loop: VirtualLoop
    shape: FleetShape
    worker: WorkerId
    epoch: Epoch
    config: WorkerConfig
    facts: LoadedModel
    log: EventLog
    pool: BlockPool
    scheduler: Scheduler
    metrics: WorkerMetrics
    use: WorkerUse
    is_dead: bool

    @property
    def role(self) -> Role: ...
    def new_session(self) -> SessionId: ...
    def compute_s(self, queued: Queued) -> float: ...
    def wake(self) -> None:
        """Wakes the work loop, and announces pages that came from elsewhere."""

    def notify(self) -> None:
        """Tells pulling workers and routers that blocks may have become readable."""
