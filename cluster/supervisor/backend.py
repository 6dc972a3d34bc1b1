"""What the supervisor keeps where a restarted one finds it: worker actors, desired state, incarnations, messages.

`FleetBackend` and `WorkerHandle` are the interface; `cluster/ray/backend.py` implements it. Only ServeErrors leave it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cluster.supervisor.actors import ActorLocation, Serving
from cluster.values.desired_state import Checkpoint, DesiredState
from cluster.values.worker_counts import WorkerCounts
from twostroke.base.errors import PeerLost
from twostroke.config import Role, WorkerConfig


class AfterDrain(enum.StrEnum):
    """What follows a drain. It is stored, so that a restarted supervisor carries it out."""

    RESTART = "restart"
    """A new epoch begins."""
    REMOVE = "remove"
    """The worker has no process until it is wanted again."""
    SWITCH_ROLE = "switch_role"
    """A new epoch begins in the same process, in another role."""
    SLEEP = "sleep"
    """The process stays without model and pages until it is woken."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of the Ray cluster that are alive."""

    leaving: Mapping[str, float]
    """Seconds until each leaving node ends; infinite if Ray names no deadline."""
    has_others: bool
    """Whether some nodes stay."""


class WorkerDied(PeerLost):
    """The process itself is gone or unreachable, as opposed to an error that it reports."""


class WorkerHandle(Protocol):
    """Controls one worker through all of its epochs."""

    async def place(self) -> ActorLocation:
        """Returns where its process is, once there is one."""

    async def run(self, incarnation: int, role: Role, checkpoint: Checkpoint) -> None:
        """Awaits the end of the epoch, which serves these weights. Raises WorkerDied if the process died."""

    async def ready(self, incarnation: int) -> Serving:
        """Returns once the epoch with this incarnation serves; either call may arrive first."""

    async def shutdown(self) -> None: ...

    async def release(self) -> None:
        """Frees what the last epoch has left in the process: model and pages."""

    def recycle(self) -> None:
        """Kills the process; a fresh one takes its place."""

    def remove(self) -> None:
        """Kills the process for good."""


class MessageStore(Protocol):
    """Messages that outlive the supervisor, by their kind and key."""

    def stored(self, kind: str) -> Mapping[str, bytes]:
        """Returns the messages of a kind by key."""

    def store(self, kind: str, key: str, message: bytes | None) -> None:
        """Stores a message, or deletes it. Raises PeerLost where Ray's head does not answer."""


class FleetBackend(MessageStore, Protocol):
    def find(self, config: WorkerConfig) -> WorkerHandle | None:
        """Returns the worker that an earlier process of the supervisor created."""

    def create(self, config: WorkerConfig) -> WorkerHandle: ...

    def next_incarnation(self, worker_id: str) -> int: ...

    def after_drain(self, worker_id: str) -> AfterDrain | None: ...

    def set_after_drain(self, worker_id: str, after_drain: AfterDrain | None) -> None: ...

    def desired(self) -> DesiredState | None:
        """Returns the state that was stored last."""

    def set_desired(self, desired: DesiredState) -> None: ...

    def request_nodes(self, placed: WorkerCounts) -> None:
        """Asks Ray's autoscaler for nodes for this many workers of each role. It removes nodes that stay idle."""

    async def nodes(self) -> Nodes:
        """Returns the nodes. Raises PeerLost if Ray's head does not answer."""

    def forget(self) -> None:
        """Deletes everything that is stored: the fleet is gone."""
