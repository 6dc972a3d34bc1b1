"""The fleet as the supervisor sees it, and as launchers and routers are told."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.supervisor.actors import ActorLocation, Serving
from cluster.supervisor.reconcile.plan import Observed, WorkerStage
from twostroke.base.errors import ServeError
from twostroke.config import Role, WorkerConfig
from twostroke.rpc.v1 import control_pb2, fleet_pb2

_STATES = {
    WorkerStage.ABSENT: control_pb2.WORKER_STATE_STARTING,
    WorkerStage.IDLE: control_pb2.WORKER_STATE_STARTING,
    WorkerStage.STARTING: control_pb2.WORKER_STATE_STARTING,
    WorkerStage.SERVING: control_pb2.WORKER_STATE_SERVING,
    WorkerStage.DRAINING: control_pb2.WORKER_STATE_DRAINING,
    WorkerStage.DEAD: control_pb2.WORKER_STATE_DEAD,
    WorkerStage.FAILED: control_pb2.WORKER_STATE_DEAD,
    WorkerStage.ASLEEP: control_pb2.WORKER_STATE_DEAD,
    WorkerStage.DRAINED: control_pb2.WORKER_STATE_DEAD,
}


@dataclass(frozen=True, slots=True)
class SupervisedWorker:
    """One worker as the supervisor sees it; launchers are told the same."""

    config: WorkerConfig
    observed: Observed
    place: ActorLocation | None = None
    serving: Serving | None = None
    """Addresses of the current epoch, or of the last one while the worker is dead."""
    last_error: ServeError | None = None
    returns: bool = False
    """Whether it drains, and a new epoch begins afterwards."""

    @property
    def worker_id(self) -> str:
        return self.config.worker_id

    @property
    def serving_now(self) -> Serving | None:
        """The epoch, if it serves and does not drain."""
        return self.serving if self.observed.stage is WorkerStage.SERVING else None

    @property
    def role(self) -> Role:
        """Role that it serves in, or begins in next."""
        return self.serving.role if self.serving else self.config.role

    def to_message(self) -> fleet_pb2.WorkerEntry:
        return fleet_pb2.WorkerEntry(
            worker_id=self.worker_id,
            role=self.role,
            address=self.serving.address if self.serving else "",
            epoch=self.serving.epoch if self.serving else "",
            state=_STATES[self.observed.stage],
            node=self.place.node_id if self.place else "",
            metrics_address=self.serving.metrics_address if self.serving else "",
            returns=self.returns,
        )


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    version: int
    workers: tuple[SupervisedWorker, ...]
