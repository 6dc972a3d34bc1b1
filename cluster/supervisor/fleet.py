"""Holds what is known of each worker and its process. Every change is told at once to those who listen."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace

from cluster.supervisor.actors import ActorLocation, Serving
from cluster.supervisor.backend import WorkerHandle
from cluster.supervisor.reconcile.plan import Observed, PlacedWorker, WorkerStage
from cluster.supervisor.view import FleetSnapshot, SupervisedWorker
from cluster.supervisor.worker_process import remove
from cluster.values.desired_state import Checkpoint
from cluster.values.exits import ProcessExit
from twostroke.base.errors import ConfigError, NotFound, ServeError
from twostroke.config import WorkerConfig
from twostroke.rpc.v1 import control_pb2

_WITHOUT_ADDRESS = frozenset({WorkerStage.STARTING, WorkerStage.ASLEEP, WorkerStage.DRAINED})
"""Stages in which nothing has to be known of the epoch before. A dead worker keeps its last address."""


class SupervisedFleet:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers: dict[str, SupervisedWorker] = {}
        self._handles: dict[str, WorkerHandle] = {}
        self._without_room: set[str] = set()
        """Workers whose next process has waited for a node for long."""
        self._leaving_nodes: Collection[str] = ()
        """Ids of Ray nodes that are about to end."""
        self._listeners: list[Callable[[int], None]] = []
        self._version = 0
        self._changed = asyncio.Event()

    # What is known

    def workers(self) -> tuple[SupervisedWorker, ...]:
        return tuple(self._workers.values())

    def worker(self, worker_id: str) -> SupervisedWorker:
        """Raises NotFound for an unknown worker."""
        if worker_id not in self._workers:
            raise NotFound(f"there is no worker {worker_id!r}; there are {', '.join(self._workers)}")
        return self._workers[worker_id]

    def stage(self, worker_id: str) -> WorkerStage:
        """Raises NotFound for an unknown worker."""
        return self.worker(worker_id).observed.stage

    def handle(self, worker_id: str) -> WorkerHandle:
        """Raises NotFound where the worker has no process."""
        if worker_id not in self._handles:
            raise NotFound(f"{worker_id} has no process")
        return self._handles[worker_id]

    def checkpoint(self, worker_id: str) -> Checkpoint | None:
        """Returns the weights that a worker serves with; None while it does not serve. Raises NotFound."""
        serving = self.worker(worker_id).serving_now
        return None if serving is None else serving.checkpoint

    def fingerprints(self) -> list[str]:
        """Returns those of all workers that serve."""
        return [each.serving_now.fingerprint for each in self.workers() if each.serving_now is not None]

    def addresses(self) -> list[str]:
        """Returns the addresses of the workers that serve."""
        return [each.serving_now.address for each in self.workers() if each.serving_now is not None]

    def has_no_room(self, worker_id: str) -> bool:
        """Returns whether the worker's next process has waited for a node for long."""
        return worker_id in self._without_room

    def placed_workers(self) -> list[PlacedWorker]:
        return [
            PlacedWorker(worker_id, worker.role, worker.observed.stage, worker.place.node_id if worker.place else None)
            for worker_id, worker in self._workers.items()
        ]

    def successors(self, worker_id: str) -> Sequence[control_pb2.Successor]:
        """Returns the serving workers of the same role with the same weights, on nodes that stay."""
        worker = self.worker(worker_id)
        return [
            control_pb2.Successor(worker_id=other.worker_id, address=serving.address, epoch=serving.epoch)
            for other in self.workers()
            if other.worker_id != worker_id
            and other.role is worker.role
            and (serving := other.serving_now) is not None
            and (worker.serving is None or serving.checkpoint == worker.serving.checkpoint)
            and not (other.place and other.place.node_id in self._leaving_nodes)
        ]

    # Waiting

    @property
    def changed(self) -> asyncio.Event:
        """The event that is set at the next change."""
        return self._changed

    async def until(self, worker_id: str, is_so: Callable[[WorkerStage], bool]) -> None:
        """Returns once the predicate holds for the worker's stage. Raises NotFound."""
        while not is_so(self.stage(worker_id)):
            await self._changed.wait()

    async def snapshot(self, after_version: int, timeout_s: float) -> FleetSnapshot:
        """Returns the fleet now, or as soon as it is newer than `after_version`."""
        if self._version <= after_version:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return FleetSnapshot(self._version, self.workers())

    def listen(self, listener: Callable[[int], None]) -> None:
        """Calls `listener` with the new version at every change, before anybody who waits continues."""
        self._listeners.append(listener)

    # Changes

    def add(self, config: WorkerConfig) -> None:
        self._workers[config.worker_id] = SupervisedWorker(config, Observed(config.worker_id))
        self.wake()

    def forget(self, worker_id: str) -> None:
        """Removes a worker that has left for good, and its process."""
        del self._workers[worker_id]
        self.remove_process(worker_id)
        self.publish()

    def enter(self, worker_id: str, stage: WorkerStage, *, returns: bool = False) -> None:
        """Moves a worker to another stage. `returns`: after this drain a new epoch of the same role begins."""
        worker = self.worker(worker_id)
        observed = worker.observed.enter(stage, self._clock())
        serving = None if stage in _WITHOUT_ADDRESS else worker.serving
        self._set(worker_id, replace(worker, observed=observed, serving=serving, returns=returns))

    def locate(self, worker_id: str, place: ActorLocation) -> None:
        """Notes where the worker's process is."""
        self._set(worker_id, replace(self.worker(worker_id), place=place))

    def serve(self, worker_id: str, serving: Serving) -> None:
        """Notes that an epoch serves."""
        worker = self.worker(worker_id)
        observed = worker.observed.enter(WorkerStage.SERVING, self._clock())
        self._set(worker_id, replace(worker, observed=observed, serving=serving, returns=False))

    def end(self, worker_id: str, error: ServeError) -> Observed:
        """Notes that an epoch has ended, and why. Returns what is known of the worker now."""
        worker = self.worker(worker_id)
        observed = worker.observed.end(self._clock(), misconfigured=isinstance(error, ConfigError))
        self._set(worker_id, replace(worker, observed=observed, last_error=error))
        return observed

    def _set(self, worker_id: str, worker: SupervisedWorker) -> None:
        self._workers[worker_id] = worker
        self.publish()

    def set_process(self, worker_id: str, handle: WorkerHandle) -> None:
        self._handles[worker_id] = handle

    def remove_process(self, worker_id: str) -> None:
        """Kills the worker's process for good, if there is one."""
        handle = self._handles.pop(worker_id, None)
        if handle is not None:
            handle.remove()

    async def remove_processes(self) -> tuple[ProcessExit, ...]:
        """Shuts every worker down and removes it. Returns how each one ended."""
        exits = await asyncio.gather(*(remove(worker_id, handle) for worker_id, handle in self._handles.items()))
        self._handles.clear()
        return tuple(exits)

    def lack_room(self, worker_id: str) -> None:
        """Notes that the worker's next process waits for a node for long: others continue without it."""
        self._without_room.add(worker_id)
        self.wake()

    def have_room(self, worker_id: str) -> None:
        self._without_room.discard(worker_id)

    def leave_nodes(self, node_ids: Collection[str]) -> None:
        """Notes which nodes are about to end: no worker on them takes over what another one hands on."""
        self._leaving_nodes = node_ids

    def publish(self) -> int:
        """Tells everybody that something has changed. Returns the new version."""
        self._version += 1
        for listener in self._listeners:
            listener(self._version)
        self.wake()
        return self._version

    def wake(self) -> None:
        """Lets everybody who waits for a change look again."""
        self._changed.set()
        self._changed = asyncio.Event()


class Changes:
    """Keeps which workers are changed now: they leave, begin anew, fall asleep or switch role."""

    def __init__(self, fleet: SupervisedFleet) -> None:
        self._fleet = fleet
        self._busy: set[str] = set()

    @property
    def busy(self) -> frozenset[str]:
        """Ids of the workers that are changed now."""
        return frozenset(self._busy)

    def begin(self, worker_id: str, work: Coroutine[None, None, None], tasks: asyncio.TaskGroup) -> None:
        """Changes a worker in a task of `tasks`. It is busy until that has ended."""
        self._busy.add(worker_id)
        task = tasks.create_task(work)
        task.add_done_callback(lambda _: self._end(worker_id))

    def _end(self, worker_id: str) -> None:
        self._busy.discard(worker_id)
        self._fleet.wake()
