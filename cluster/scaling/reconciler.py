"""Owns the desired state and changes the fleet until it matches. One decode worker always stays.

Every pass starts from the desired state and from what is observed, never from what was done last. So a restarted
supervisor goes on in the middle of a change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Protocol

from cluster.ray.backend import AfterDrain, Backend, WorkerDied, WorkerHandle
from cluster.scaling.capacity import WorkerCounts
from cluster.scaling.desired_state import Checkpoint, DesiredState, Slot, Weights, counts_of, revised
from cluster.spec import FleetSpec
from cluster.supervisor.drains import DEADLINE_S, SWITCH_S, Drains
from cluster.supervisor.plan import WorkerStage
from cluster.supervisor.replacement import check_replacement
from cluster.supervisor.weights import (
    LoadedWorker,
    is_changing,
    last_decode_worker,
    next_to_reload,
    weights_after_failure,
    weights_now,
)
from twostroke.config import Role, WorkerConfig
from twostroke.errors import ConfigError, InvalidRequest, NotFound, PeerLost, ServeError
from twostroke.rpc.v1 import fleet_pb2

log = logging.getLogger(__name__)

FOUND_WORKER_S = 5.0
"""Seconds for a process that was found to report that it serves. A process that starts takes longer."""
CRASHES_TO_GIVE_UP = 3
"""Crashes in a row of a worker with new weights before the fleet stays with, or returns to, those that it had."""


class ReconciledFleet(Protocol):
    """What the reconciler needs of the supervisor."""

    def stage(self, worker_id: str) -> WorkerStage:
        """Return the stage. Raises NotFound for an unknown worker."""

    def role(self, worker_id: str) -> Role:
        """Return the role in which it serves, or shall begin."""

    def handle(self, worker_id: str) -> WorkerHandle: ...

    def add(self, config: WorkerConfig) -> None: ...

    def enter(self, worker_id: str, stage: WorkerStage) -> None: ...

    def forget(self, worker_id: str) -> None:
        """Remove a worker that has left, and its process."""

    def publish(self) -> None:
        """Send the desired state to watchers and wake the supervisor."""

    def wake(self) -> None:
        """Make the supervisor look at every worker."""

    def checkpoint(self, worker_id: str) -> Checkpoint | None:
        """Return the weights that it serves with; None while it does not serve."""

    def has_no_room(self, worker_id: str) -> bool:
        """Tell whether its next process has waited for a node for long."""

    async def until_change(self) -> None:
        """Return when the supervisor has something new to look at."""

    async def until(self, worker_id: str, is_so: Callable[[WorkerStage], bool]) -> None: ...


class Reconciler:
    def __init__(self, fleet: ReconciledFleet, backend: Backend, drains: Drains, spec: FleetSpec) -> None:
        self._fleet = fleet
        self._backend = backend
        self._drains = drains
        self._spec = spec
        self._busy: set[str] = set()
        """Workers that leave or switch now."""
        self._changes = self._switches = 0
        """Changes of the desired workers, and switches of role, since the supervisor started."""
        self._load_error: ServeError | None = None
        """Why the last reload was given up."""
        self._reload_s = DEADLINE_S
        """Seconds that requests have on a worker that is to load other weights."""
        self._sleep_s: dict[str, float] = {}
        """Seconds that requests have on a worker that is to sleep, by worker."""
        self._asked: WorkerCounts | None = None
        """Workers that nodes were last requested for; None before any request."""
        written = backend.desired()
        if written is not None and written.fleet == spec.identity:
            self.desired = written
        else:
            self.desired = DesiredState.of(spec.identity, spec.workers, is_automatic=spec.scales)

    def configs(self) -> list[WorkerConfig]:
        return [self._spec.worker(worker_id, slot.role) for worker_id, slot in self.desired.slots.items()]

    def shall_be(self, worker_id: str) -> Role:
        return self.desired.slots[worker_id].role

    @property
    def wanted(self) -> WorkerCounts:
        """Workers that shall serve. A worker that was drained or cannot start counts again once it is asked back."""
        return counts_of(self.desired, self._gone())

    def startable(self, wanted: WorkerCounts) -> WorkerCounts:
        """Limit what a planner asks for: where one worker of a role cannot start, more would not either.

        A worker that an operator has put to sleep is not replaced.
        """
        for role, now, then in zip((Role.PREFILL, Role.DECODE), self.wanted.pair, wanted.pair, strict=True):
            if then > now and self._failed(role):
                return self.wanted
        counts = zip((Role.PREFILL, Role.DECODE), self.wanted.pair, wanted.pair, strict=True)
        return WorkerCounts(*(max(min(now, then), then - self._asleep(role)) for role, now, then in counts))

    def to_message(self) -> fleet_pb2.Scaling:
        wanted = self.wanted
        return fleet_pb2.Scaling(
            wanted_prefill=wanted.prefill,
            wanted_decode=wanted.decode,
            automatic=self.desired.is_automatic,
            changes=self._changes,
            switches=self._switches,
            reloading=self.is_reloading,
        )

    def scale(self, wanted: WorkerCounts, held: Mapping[str, int], *, is_automatic: bool, reason: str) -> None:
        """Set how many workers there shall be from now on."""
        self._forget_failed(wanted)
        desired = revised(self.desired, wanted, held, self._gone(), may_switch=self._spec.flexible)
        if desired.slots != self.desired.slots:
            self._changes += 1
            log.info("scaling before=%s wanted=%s reason=%s", self.wanted, wanted, reason)
        self._write(replace(desired, is_automatic=is_automatic, reason=reason))
        self._request_nodes()

    def check_may_leave(self, worker_id: str) -> None:
        """Raises InvalidRequest where no other worker of its role serves, NotFound where there is no such worker."""
        if self._fleet.stage(worker_id) is not WorkerStage.SERVING:
            return
        role = self._fleet.role(worker_id)
        if not self._others_take_requests(worker_id, role):
            raise InvalidRequest(
                f"{worker_id} is the last {role} worker that serves: add one first (twostroke scale), or pass --force",
                field="--force",
            )

    def check_may_restart(self, worker_id: str) -> None:
        """Raises PeerLost where another command makes workers begin anew or sleep, InvalidRequest for a sleeping one.

        Two that go at once may be all that a role has.
        """
        if self.is_reloading:
            raise PeerLost(
                "the fleet is loading other weights, for which every worker begins anew: try again when it has them"
            )
        if self._stage(worker_id) is WorkerStage.ASLEEP:
            raise InvalidRequest(f"{worker_id} sleeps: it begins anew with: twostroke wake {worker_id}", field="worker")
        on_its_way = (WorkerStage.SERVING, WorkerStage.DRAINING)
        for name, slot in self.desired.slots.items():
            if slot.is_asleep and self._stage(name) in on_its_way:
                raise PeerLost(f"{name} is falling asleep: try again when it is")

    @property
    def is_reloading(self) -> bool:
        return bool(self.desired.weights.latest) and is_changing(self._loaded_workers(), self.desired.weights)

    def _forget_failed(self, wanted: WorkerCounts) -> None:
        """If more workers of a role are wanted, remove those that could not start, so that their names can be used
        again.
        """
        for role, now, then in zip((Role.PREFILL, Role.DECODE), self.wanted.pair, wanted.pair, strict=True):
            for name in self._failed(role) if then > now else ():
                self._fleet.forget(name)
                self.desired = self.desired.without(name)

    def _request_nodes(self) -> None:
        self._asked = self._placed()
        self._backend.request_nodes(self._asked)

    def _placed(self) -> WorkerCounts:
        gone = self._gone()
        return WorkerCounts(self.desired.placed(Role.PREFILL, gone), self.desired.placed(Role.DECODE, gone))

    def _gone(self) -> frozenset[str]:
        return frozenset(name for name in self.desired.slots if self._stage(name) in _GONE)

    def _asleep(self, role: Role) -> int:
        return sum(self.desired.slots[name].is_asleep for name in self.desired.workers(role))

    def _failed(self, role: Role) -> list[str]:
        return [name for name in self.desired.workers(role) if self._stage(name) is WorkerStage.FAILED]

    def set_automatic(self, *, is_automatic: bool) -> None:
        self._write(replace(self.desired, is_automatic=is_automatic))

    async def assign(self, worker_id: str, role: Role) -> None:
        """Switch a worker; return when it serves in this role.

        Raises NotFound, ConfigError, InvalidRequest or PeerLost.
        """
        slot = self._slot(worker_id)
        if role is not slot.role:
            self._check_may_become(worker_id, role)
            desired = self.desired.with_slot(worker_id, Slot(role))
            self._write(replace(desired, is_automatic=False, reason=f"{worker_id} was told to {role}"))
        await self._until_serves(worker_id, Slot(role))

    def _check_may_become(self, worker_id: str, role: Role) -> None:
        if not self._spec.flexible:
            raise ConfigError(
                "workers of this fleet keep their roles: start it with --flexible, or with room between --min-* and "
                "--max-* of both roles",
                field="--flexible",
            )
        if self._stage(worker_id) in _GONE:
            raise PeerLost(f"{worker_id} is {self._stage(worker_id)}: only a worker that serves can switch")
        others = (name for name in self.desired.workers(Role.DECODE) if name != worker_id)
        if role is Role.PREFILL and all(self._stage(name) in _GONE for name in others):
            raise InvalidRequest(f"{worker_id} is the last decode worker: add one first", field="worker")

    async def _until_serves(self, worker_id: str, slot: Slot) -> None:
        def is_settled(stage: WorkerStage) -> bool:
            serves = stage is WorkerStage.SERVING and self._fleet.role(worker_id) is slot.role
            return serves or stage in _GONE or self.desired.slots[worker_id] != slot

        await self._fleet.until(worker_id, is_settled)
        if self.desired.slots[worker_id] != slot:
            raise InvalidRequest(f"another command has changed {worker_id} meanwhile", field="worker")
        if self._stage(worker_id) in _GONE:
            raise PeerLost(f"{worker_id} is {self._stage(worker_id)}: it serves in no role")

    def look(self, tasks: asyncio.TaskGroup) -> None:
        """Begin every change that can begin now."""
        if self._asked not in (None, self._placed()):
            self._request_nodes()
        self._look_at_weights(tasks)
        for worker_id, slot in self.desired.slots.items():
            try:
                stage = self._fleet.stage(worker_id)
            except NotFound:
                self._fleet.add(self._spec.worker(worker_id, slot.role))
                continue
            at_rest = stage in (WorkerStage.SERVING, WorkerStage.ASLEEP)
            if worker_id in self._busy or (at_rest and self._drains.lingers(worker_id)):
                continue
            if slot.is_retiring:
                if stage is WorkerStage.ABSENT:  # its process may still be found
                    self._backend.set_after_drain(worker_id, AfterDrain.REMOVE)
                elif stage is not WorkerStage.SERVING or self._can_be_spared(worker_id):
                    self._begin(worker_id, self._retire(worker_id, tasks), tasks)
            elif slot.is_asleep:
                if stage is WorkerStage.SERVING:
                    self._begin(worker_id, self._fall_asleep(worker_id, tasks), tasks)
            elif stage is WorkerStage.ASLEEP:
                self._fleet.enter(worker_id, WorkerStage.IDLE)
            elif self.shall_switch(worker_id) and stage is WorkerStage.SERVING and self._can_be_spared(worker_id):
                self._begin(worker_id, self._switch(worker_id, tasks), tasks)

    async def put_to_sleep(self, worker_id: str, deadline_s: float) -> None:
        """Return when the worker sleeps. Raises NotFound, InvalidRequest or PeerLost."""
        slot = self._slot(worker_id)
        if self._stage(worker_id) not in (WorkerStage.SERVING, WorkerStage.ASLEEP):
            raise PeerLost(f"{worker_id} is {self._stage(worker_id)}: only a worker that serves can sleep")
        self._sleep_s[worker_id] = deadline_s
        slot = replace(slot, is_asleep=True)
        self._write(replace(self.desired.with_slot(worker_id, slot), reason=f"{worker_id} was told to sleep"))
        await self._until_stage(worker_id, slot, WorkerStage.ASLEEP)
        await self._drains.until_over(worker_id)

    async def wake_up(self, worker_id: str) -> None:
        """Return when the worker serves. Raises NotFound, InvalidRequest or PeerLost."""
        slot = self._slot(worker_id)
        if not slot.is_asleep:
            raise InvalidRequest(f"{worker_id} is not asleep: it is {self._stage(worker_id)}", field="worker")
        slot = replace(slot, is_asleep=False)
        self._write(replace(self.desired.with_slot(worker_id, slot), reason=f"{worker_id} was woken"))
        await self._until_stage(worker_id, slot, WorkerStage.SERVING)

    def shall_sleep(self, worker_id: str) -> bool:
        return self.desired.slots[worker_id].is_asleep

    async def reload(self, model: str, deadline_s: float) -> list[str]:
        """Return when all workers that serve have these weights, with those that wait for a node of Ray.

        Raises ConfigError, or PeerLost, also where one worker cannot be spared while others wait for a node.
        """
        served = self._spec.workers[0].model
        await asyncio.to_thread(check_replacement, served, self.desired.weights.wanted.model or served.model, model)
        weights = self.desired.weights
        if weights.wanted != weights.routed:
            raise PeerLost("the fleet is loading other weights already: try again when it has them")
        wanted = Checkpoint(model or weights.wanted.model, weights.latest + 1)
        self._reload_s, self._load_error = deadline_s, None
        reason = f"the fleet was told to load {wanted.model or served.model}"
        weights = Weights(wanted, weights.routed, before=weights.routed, latest=wanted.number)
        self._write(replace(self.desired, weights=weights, reason=reason))
        log.info("weights change model=%s number=%d", wanted.model or served.model, wanted.number)
        while (waiting := self._waiting_for_room(wanted)) is None:
            if self.desired.weights.wanted != wanted:
                raise self._load_error or PeerLost("another command has changed the fleet's weights meanwhile")
            await self._fleet.until_change()
        return waiting

    def _waiting_for_room(self, wanted: Checkpoint) -> list[str] | None:
        """Return the workers without a process where all others have these weights; None while some have not.

        Raises PeerLost where only a worker is left that cannot be spared before one of those serves.
        """
        workers = self._loaded_workers()
        waiting = [each.worker_id for each in workers if each.has_no_room]
        outdated = [each for each in workers if each.checkpoint != wanted and not each.has_no_room]
        is_at_rest = all(each.checkpoint is not None for each in outdated)
        held_back = last_decode_worker(workers)
        if held_back is not None and is_at_rest and next_to_reload(workers, self.desired.weights) is None and outdated:
            raise PeerLost(
                f"Ray has no node with room for {', '.join(waiting)}, and {held_back} is the last decode worker that "
                "serves: it loads the weights as soon as another one serves"
            )
        return None if outdated else waiting

    def could_not_serve(self, worker_id: str, error: ServeError, crashes: int) -> None:
        """Note that an epoch has failed. New weights are given up for that while other workers have the old ones."""
        weights = self.desired.weights
        before = weights_after_failure(self._loaded_workers(), weights)
        if before == weights or (isinstance(error, WorkerDied) and crashes < CRASHES_TO_GIVE_UP):
            return
        self._load_error = type(error)(f"{worker_id} cannot load the weights: {error.message}", field=error.field)
        log.error("weights given up worker=%s model=%s error=%s", worker_id, weights.wanted.model, error.message)
        reason = f"weights of {weights.wanted.model} were given up: {error.message}"
        self._write(replace(self.desired, weights=before, reason=reason))

    def _slot(self, worker_id: str) -> Slot:
        slot = self.desired.slots.get(worker_id)
        if slot is None or slot.is_retiring:
            raise NotFound(f"there is no worker {worker_id!r}; there are {', '.join(self.desired.slots)}")
        return slot

    async def _until_stage(self, worker_id: str, slot: Slot, wanted: WorkerStage) -> None:
        """Return when the worker is in this stage; raises where another command or a failure prevents it."""
        while self._stage(worker_id) is not wanted:
            if self.desired.slots.get(worker_id) != slot:
                raise InvalidRequest(f"another command has changed {worker_id} meanwhile", field="worker")
            if self._stage(worker_id) in (WorkerStage.FAILED, WorkerStage.DRAINED):
                raise PeerLost(f"{worker_id} is {self._stage(worker_id)}")
            await self._fleet.until_change()

    def _look_at_weights(self, tasks: asyncio.TaskGroup) -> None:
        """Let new requests go to the new weights once enough workers have them, and begin the next reload."""
        if not self.desired.weights.latest:
            return
        workers = self._loaded_workers()
        weights = weights_now(workers, self.desired.weights)
        if weights != self.desired.weights:
            log.info("requests go to the new weights model=%s number=%d", weights.routed.model, weights.routed.number)
            self._write(replace(self.desired, weights=weights))
        is_busy = any(not self._fleet.has_no_room(name) for name in self._busy)
        if not is_busy and (worker_id := next_to_reload(workers, weights)) is not None:
            self._begin(worker_id, self._reload(worker_id, tasks), tasks)

    def _loaded_workers(self) -> list[LoadedWorker]:
        """Return the workers that serve or will by themselves."""
        gone = self._gone()
        return [
            LoadedWorker(
                name, slot.role, None if name in self._busy else self._checkpoint(name), self._fleet.has_no_room(name)
            )
            for name, slot in self.desired.slots.items()
            if name not in gone and not slot.is_retiring and not slot.is_asleep
        ]

    def _checkpoint(self, worker_id: str) -> Checkpoint | None:
        try:
            return self._fleet.checkpoint(worker_id)
        except NotFound:
            return None

    async def _reload(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        try:
            await self._drains.drain(worker_id, self._reload_s, True, tasks)
        except PeerLost as error:
            log.warning("worker does not load the weights yet worker=%s error=%s", worker_id, error)

    async def _fall_asleep(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        try:
            await self._drains.put_to_sleep(worker_id, self._sleep_s.get(worker_id, DEADLINE_S), tasks)
        except PeerLost as error:
            log.warning("worker does not sleep yet worker=%s error=%s", worker_id, error)

    def shall_switch(self, worker_id: str) -> bool:
        return self._fleet.role(worker_id) is not self.desired.slots[worker_id].role

    def _can_be_spared(self, worker_id: str) -> bool:
        """Tell whether the fleet can serve without the worker.

        Prompts need no prefill workers, but only decode workers generate.
        """
        return self._fleet.role(worker_id) is Role.PREFILL or self._others_take_requests(worker_id, Role.DECODE)

    def _others_take_requests(self, worker_id: str, role: Role) -> bool:
        """Tell whether another worker of this role takes new requests, with the weights that they go to, and stays."""
        routed = self.desired.weights.routed
        return any(
            self._checkpoint(name) == routed and self._fleet.role(name) is role
            for name, slot in self.desired.slots.items()
            if name not in (worker_id, *self._busy) and not slot.is_retiring and not slot.is_asleep
        )

    def _stage(self, worker_id: str) -> WorkerStage:
        """Return the stage of a worker that may be desired and not created yet."""
        try:
            return self._fleet.stage(worker_id)
        except NotFound:
            return WorkerStage.ABSENT

    def _begin(self, worker_id: str, work: Coroutine[None, None, None], tasks: asyncio.TaskGroup) -> None:
        self._busy.add(worker_id)
        task = tasks.create_task(work)
        task.add_done_callback(lambda _: self._end(worker_id))

    def _end(self, worker_id: str) -> None:
        self._busy.discard(worker_id)
        self._fleet.wake()

    async def _retire(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        """Let a worker leave for good. If somebody asks it back meanwhile, the next pass begins anew."""
        if self._fleet.stage(worker_id) in (WorkerStage.SERVING, WorkerStage.DRAINING, WorkerStage.DRAINED):
            try:
                await self._drains.drain(worker_id, DEADLINE_S, False, tasks)
            except PeerLost as error:
                log.warning("worker does not retire yet worker=%s error=%s", worker_id, error)
                return
        else:
            await self._end_unserved(worker_id)
        await self._drains.until_over(worker_id)
        if self._fleet.stage(worker_id) not in _GONE:
            return
        self._backend.set_after_drain(worker_id, None)
        self._fleet.forget(worker_id)
        self._write(self.desired.without(worker_id))
        log.info("worker has retired worker=%s", worker_id)

    async def _end_unserved(self, worker_id: str) -> None:
        """End a worker that does not serve. A process that was found may turn out to serve; then it drains."""
        fleet = self._fleet
        self._backend.set_after_drain(worker_id, AfterDrain.REMOVE)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FOUND_WORKER_S):
                await fleet.until(worker_id, lambda stage: stage not in _BEGINNING)
        if fleet.stage(worker_id) is WorkerStage.DEAD:
            fleet.enter(worker_id, WorkerStage.DRAINED)
        elif fleet.stage(worker_id) in _BEGINNING:
            fleet.handle(worker_id).remove()
        await fleet.until(worker_id, lambda stage: stage in _GONE or stage is WorkerStage.SERVING)

    async def _switch(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        self._switches += 1
        started_s = asyncio.get_running_loop().time()
        try:
            left = await self._drains.switch(worker_id, SWITCH_S, tasks)
        except PeerLost as error:
            log.warning("worker does not switch yet worker=%s error=%s", worker_id, error)
            return
        seconds = asyncio.get_running_loop().time() - started_s
        log.info(
            "switched worker=%s role=%s cut_off=%d seconds=%.2f", worker_id, self.shall_be(worker_id), left, seconds
        )

    def _write(self, desired: DesiredState) -> None:
        if desired != self.desired:
            self._backend.set_desired(desired)
            self.desired = desired
            self._fleet.publish()


_GONE = frozenset({WorkerStage.ASLEEP, WorkerStage.DRAINED, WorkerStage.FAILED})
"""Stages of a worker that will not serve by itself."""
_BEGINNING = frozenset({WorkerStage.IDLE, WorkerStage.STARTING})
