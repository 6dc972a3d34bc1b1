"""What the supervisor stands on: worker actors it can find again, and incarnations that only grow.

`Ground` and `WorkerHandle` are the small interface; `RayGround` is Ray behind it. Only ServeErrors leave it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import ray
import ray.exceptions
from ray.autoscaler.sdk import request_resources
from ray.experimental import internal_kv

from cluster.actors import MOUNTS, MountedWorker, Place, Serving
from cluster.placement import nodes_from_ray, worker_options
from cluster.planner import Counts
from cluster.scaling.nodes import room_for
from cluster.scaling.roster import Roster
from cluster.spec import NAMESPACE
from twostroke.config import Role, RoleConfig, WorkerConfig
from twostroke.errors import InternalError, PeerLost, ServeError
from twostroke.json_values import from_json, to_json

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

RECYCLED_PAUSE_S = 0.05
"""Between two looks whether a process is a fresh one."""
NODES_S = 2.0
"""For Ray's head to say which nodes leave."""
KV_NAMESPACE = "twostroke"
"""Of Ray's internal key-value store."""
ROSTER_KEY = "roster"
ROOM_KEY = "room"
"""There where room was asked for: Ray's autoscaler keeps it, over all lives of a supervisor, until somebody asks for
something else."""


class Departure(enum.StrEnum):
    """What becomes of a worker that drains; a restarted supervisor goes on with it."""

    BACK = "back"
    """A new life begins."""
    AWAY = "away"
    """It stays away until it is asked back."""
    SWITCH = "switch"
    """A new life begins in the same process, in another role."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The living ones."""

    leaving: Mapping[str, float]
    """Those that shall be left, and for how many seconds they will still be there; infinite: nobody has said."""
    has_others: bool
    """There are some that stay."""


class WorkerDied(PeerLost):
    """The process itself is gone (or cannot be reached), as opposed to an error that it reports."""


class WorkerHandle(Protocol):
    """One worker over all of its lives."""

    async def place(self) -> Place:
        """Where its process is; waits until there is one."""

    async def run(self, incarnation: int, role: Role) -> None:
        """The death watch: ends when the life does, with WorkerDied if the process died."""

    async def ready(self, incarnation: int) -> Serving:
        """Once what `run` began, or joined, with that incarnation serves, whichever of the two calls arrives first."""

    async def shutdown(self) -> None: ...

    def recycle(self) -> None:
        """Kill the process; a fresh one takes its place."""

    def remove(self) -> None:
        """Kill the process for good."""


class Ground(Protocol):
    def find(self, config: WorkerConfig) -> WorkerHandle | None:
        """The worker that an earlier life of the supervisor created."""

    def create(self, config: WorkerConfig) -> WorkerHandle: ...

    def next_incarnation(self, worker_id: str) -> int: ...

    def departure(self, worker_id: str) -> Departure | None: ...

    def set_departure(self, worker_id: str, departure: Departure | None) -> None: ...

    def roster(self) -> Roster | None:
        """As it was written down last."""

    def set_roster(self, roster: Roster) -> None: ...

    def ask_for_room(self, placed: Counts) -> None:
        """Let there be nodes for so many workers, if somebody can start some; those that stay idle, that one ends. By
        the role in which they were asked for."""

    async def nodes(self) -> Nodes:
        """Raises PeerLost where nobody answers."""

    def forget(self) -> None:
        """The fleet is gone: nothing of it stays behind."""


class RayWorker:
    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._place: Place | None = None
        self._left: Place | None = None
        """Of the process that was recycled: Ray kills it some time later, and until then it answers."""

    async def place(self) -> Place:
        while (place := await self._place_now()) == self._left:  # noqa: ASYNC110  # of another process
            await asyncio.sleep(RECYCLED_PAUSE_S)
        self._place = place
        return place

    async def _place_now(self) -> Place:
        # Ray would refuse a call to an actor that is being restarted; with retries it waits for it.
        return await _answer(self._actor.place.options(max_task_retries=-1).remote())

    async def run(self, incarnation: int, role: Role) -> None:
        await _answer(self._actor.run.remote(incarnation, role))

    async def ready(self, incarnation: int) -> Serving:
        return await _answer(self._actor.ready.remote(incarnation))

    async def shutdown(self) -> None:
        await _answer(self._actor.shutdown.remote())

    def recycle(self) -> None:
        self._left = self._place
        ray.kill(self._actor, no_restart=False)

    def remove(self) -> None:
        ray.kill(self._actor, no_restart=True)


class RayGround:
    def __init__(
        self,
        *,
        worker_count: int,
        roles: Mapping[Role, RoleConfig] | None = None,
        mounts: dict[Role, type[MountedWorker]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`roles`: what workers ask of nodes. `clock`: of the wall."""
        self._worker_count = worker_count
        self._roles = roles or {}
        self._mounts = mounts or MOUNTS
        self._clock = clock

    def find(self, config: WorkerConfig) -> RayWorker | None:
        try:
            return RayWorker(ray.get_actor(config.worker_id, namespace=NAMESPACE))
        except ValueError:
            return None

    def create(self, config: WorkerConfig) -> RayWorker:
        options = worker_options(
            nodes_from_ray(ray.nodes()),
            config.role,
            self._roles.get(config.role, RoleConfig()),
            worker_count=self._worker_count,
            wants_gpu=not config.model.is_paced,
        )
        log.info("worker created worker=%s options=%s", config.worker_id, options)
        # Detached: a worker and its streams outlive the supervisor that created it.
        actor_class = ray.remote(max_restarts=-1, max_task_retries=0)(self._mounts[config.role]).options(
            name=config.worker_id, namespace=NAMESPACE, lifetime="detached", **options
        )
        return RayWorker(actor_class.remote(config))

    def next_incarnation(self, worker_id: str) -> int:
        key = _incarnation_key(worker_id)
        last = internal_kv._internal_kv_get(key, namespace=KV_NAMESPACE)
        # Routers may outlive a fleet, and Ray's store: what they remember of it must not outrank the first new life.
        incarnation = int(last) + 1 if last else max(1, int(self._clock()))
        internal_kv._internal_kv_put(key, str(incarnation), overwrite=True, namespace=KV_NAMESPACE)
        return incarnation

    def departure(self, worker_id: str) -> Departure | None:
        value = internal_kv._internal_kv_get(_departure_key(worker_id), namespace=KV_NAMESPACE)
        return Departure(value.decode()) if value else None

    def set_departure(self, worker_id: str, departure: Departure | None) -> None:
        key = _departure_key(worker_id)
        if departure is None:
            internal_kv._internal_kv_del(key, namespace=KV_NAMESPACE)
        else:
            internal_kv._internal_kv_put(key, departure.value, overwrite=True, namespace=KV_NAMESPACE)

    def roster(self) -> Roster | None:
        value = internal_kv._internal_kv_get(ROSTER_KEY, namespace=KV_NAMESPACE)
        return from_json(Roster, value.decode()) if value else None

    def set_roster(self, roster: Roster) -> None:
        internal_kv._internal_kv_put(ROSTER_KEY, to_json(roster), overwrite=True, namespace=KV_NAMESPACE)

    def ask_for_room(self, placed: Counts) -> None:
        room = room_for(placed, self._roles)
        if room.bundles:
            internal_kv._internal_kv_put(ROOM_KEY, "asked", overwrite=True, namespace=KV_NAMESPACE)
            request_resources(bundles=room.bundles, bundle_label_selectors=room.selectors)

    async def nodes(self) -> Nodes:
        try:
            return await asyncio.to_thread(_nodes_now)
        except ray.exceptions.RayError as error:
            raise PeerLost(f"Ray does not say which nodes leave: {_first_line(error)}") from error

    def forget(self) -> None:
        if internal_kv._internal_kv_get(ROOM_KEY, namespace=KV_NAMESPACE):
            request_resources(bundles=[])
        for prefix in (_incarnation_key(""), _departure_key(""), ROSTER_KEY, ROOM_KEY):
            for key in internal_kv._internal_kv_list(prefix, namespace=KV_NAMESPACE):
                internal_kv._internal_kv_del(key, namespace=KV_NAMESPACE)


def _nodes_now() -> Nodes:
    """As Ray's own libraries ask: for nodes that are drained by hand, by an autoscaler or before a preemption."""
    deadlines_ms: dict[str, int] = ray._private.worker.global_worker.gcs_client.get_draining_nodes(timeout=NODES_S)
    if not deadlines_ms:
        return Nodes({}, has_others=True)
    living = {node.node_id for node in nodes_from_ray(ray.nodes())}
    now_s = time.time()
    leaving = {
        node_id: deadline_ms / 1000 - now_s if deadline_ms else math.inf
        for node_id, deadline_ms in deadlines_ms.items()
        if node_id in living
    }
    return Nodes(leaving, has_others=living > leaving.keys())


def _incarnation_key(worker_id: str) -> str:
    return f"incarnation/{worker_id}"


def _departure_key(worker_id: str) -> str:
    return f"departure/{worker_id}"


async def _answer(reference: Awaitable[Answer]) -> Answer:
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ServeError):
            raise error.cause from None
        raise InternalError(str(error)) from error
    except ray.exceptions.RayError as error:
        raise WorkerDied(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
