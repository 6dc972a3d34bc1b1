"""Keeps in Ray what a restarted supervisor must find again: worker actors, desired state, incarnations, messages."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import ray
import ray.exceptions
from ray.autoscaler.sdk import request_resources
from ray.experimental import internal_kv

from cluster.supervisor.actors import MOUNTS, ActorLocation, MountedWorker, Serving
from cluster.supervisor.backend import AfterDrain, Nodes, WorkerDied
from cluster.values.desired_state import Checkpoint, DesiredState
from cluster.values.placement import gpus_of, node_request_for, nodes_from_ray, worker_options
from cluster.values.spec import NAMESPACE
from cluster.values.worker_counts import WorkerCounts
from twostroke.base.errors import InternalError, PeerLost, ServeError
from twostroke.base.json_values import from_json, to_json
from twostroke.config import Role, RoleConfig, WorkerConfig

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

RECYCLED_PAUSE_S = 0.05
"""Seconds between two checks of whether Ray has replaced a killed process."""
NODES_S = 2.0
"""Seconds for Ray's head to say which nodes are about to end."""
KV_NAMESPACE = "twostroke"
"""Namespace in Ray's internal key-value store."""
DESIRED_KEY = "desired_state"
NODE_REQUEST_KEY = "node_request"
"""Key that is set where nodes were requested. Ray's autoscaler keeps a request until another one replaces it."""


class RayWorker:
    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._place: ActorLocation | None = None
        self._killed_place: ActorLocation | None = None
        """The process that was killed. Ray ends it some time later, and until then it answers."""

    async def place(self) -> ActorLocation:
        # no event tells that another process has the actor
        while (place := await self._place_now()).is_same_process(self._killed_place):  # noqa: ASYNC110
            await asyncio.sleep(RECYCLED_PAUSE_S)
        self._place = place
        return place

    async def _place_now(self) -> ActorLocation:
        # Ray refuses calls to an actor that restarts; with retries the call waits.
        return await _result(self._actor.place.options(max_task_retries=-1).remote())

    async def run(self, incarnation: int, role: Role, checkpoint: Checkpoint) -> None:
        await _result(self._actor.run.remote(incarnation, role, checkpoint))

    async def ready(self, incarnation: int) -> Serving:
        return await _result(self._actor.ready.remote(incarnation))

    async def shutdown(self) -> None:
        await _result(self._actor.shutdown.remote())

    async def release(self) -> None:
        await _result(self._actor.release.remote())

    def recycle(self) -> None:
        self._killed_place = self._place
        ray.kill(self._actor, no_restart=False)

    def remove(self) -> None:
        ray.kill(self._actor, no_restart=True)


class RayBackend:
    def __init__(
        self,
        *,
        worker_count: int,
        roles: Mapping[Role, RoleConfig] | None = None,
        mounts: dict[Role, type[MountedWorker]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`roles`: the resources and labels that each role's workers need. `clock`: wall-clock time in seconds."""
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
            gpus_each=gpus_of(config.model, config.role),
        )
        log.info("worker created worker=%s options=%s", config.worker_id, options)
        # Detached, so that a worker and its streams outlive the supervisor that created it.
        actor_class = ray.remote(max_restarts=-1, max_task_retries=0)(self._mounts[config.role]).options(
            name=config.worker_id, namespace=NAMESPACE, lifetime="detached", **options
        )
        return RayWorker(actor_class.remote(config))

    def next_incarnation(self, worker_id: str) -> int:
        key = f"incarnation/{worker_id}"
        last = _read(key)
        # Routers may outlive a fleet and Ray's store: a new fleet's first epoch must be higher than the last one they
        # know.
        incarnation = int(last) + 1 if last else max(1, int(self._clock()))
        _write(key, str(incarnation))
        return incarnation

    def after_drain(self, worker_id: str) -> AfterDrain | None:
        value = _read(f"after_drain/{worker_id}")
        return AfterDrain(value.decode()) if value else None

    def set_after_drain(self, worker_id: str, after_drain: AfterDrain | None) -> None:
        _write(f"after_drain/{worker_id}", None if after_drain is None else after_drain.value)

    def desired(self) -> DesiredState | None:
        value = _read(DESIRED_KEY)
        return from_json(DesiredState, value.decode()) if value else None

    def set_desired(self, desired: DesiredState) -> None:
        _write(DESIRED_KEY, to_json(desired))

    def stored(self, kind: str) -> dict[str, bytes]:
        prefix = f"{kind}/"
        values = {key: _read(key) for key in _keys(prefix)}
        return {key.removeprefix(prefix): value for key, value in values.items() if value}

    def store(self, kind: str, key: str, message: bytes | None) -> None:
        try:
            _write(f"{kind}/{key}", message)
        except ray.exceptions.RayError as error:
            raise PeerLost(f"Ray's store of {kind}s does not answer: {_first_line(error)}") from error

    def request_nodes(self, placed: WorkerCounts) -> None:
        room = node_request_for(placed, self._roles)
        if room.bundles:
            _write(NODE_REQUEST_KEY, "asked")
            request_resources(bundles=room.bundles, bundle_label_selectors=room.selectors)

    async def nodes(self) -> Nodes:
        try:
            return await asyncio.to_thread(_nodes_now)
        except ray.exceptions.RayError as error:
            raise PeerLost(f"Ray does not say which nodes leave: {_first_line(error)}") from error

    def forget(self) -> None:
        if _read(NODE_REQUEST_KEY):
            request_resources(bundles=[])
        for key in _keys():
            _write(key, None)


def _keys(prefix: str = "") -> list[str]:
    """Returns the fleet's keys in Ray's store."""
    return sorted(key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=KV_NAMESPACE))


def _read(key: str) -> bytes | None:
    value: bytes | None = internal_kv._internal_kv_get(key, namespace=KV_NAMESPACE)
    return value


def _write(key: str, value: str | bytes | None) -> None:
    """Stores a value, or deletes it. Raises RayError where Ray's head does not answer."""
    if value is None:
        internal_kv._internal_kv_del(key, namespace=KV_NAMESPACE)
    else:
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace=KV_NAMESPACE)


def _nodes_now() -> Nodes:
    """Asks Ray's head which nodes drain: by hand, by an autoscaler or before a preemption."""
    deadlines_ms: dict[str, int] = ray._private.worker.global_worker.gcs_client.get_draining_nodes(timeout=NODES_S)
    if not deadlines_ms:
        return Nodes({}, has_others=True)
    alive = {node.node_id for node in nodes_from_ray(ray.nodes())}
    now_s = time.time()
    leaving = {
        node_id: deadline_ms / 1000 - now_s if deadline_ms else math.inf
        for node_id, deadline_ms in deadlines_ms.items()
        if node_id in alive
    }
    return Nodes(leaving, has_others=alive > leaving.keys())


async def _result(reference: Awaitable[Answer]) -> Answer:
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
