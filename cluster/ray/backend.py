"""Keeps in Ray what a restarted supervisor must find again: worker actors, desired state, incarnations, pins."""

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
from cluster.values.placement import gpu_ranks_of, node_request_for, nodes_from_ray, worker_options
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
            gpu_ranks=gpu_ranks_of(config.model, config.role),
        )
        log.info("worker created worker=%s options=%s", config.worker_id, options)
        # Detached, so that a worker and its streams outlive the supervisor that created it.
        actor_class = ray.remote(max_restarts=-1, max_task_retries=0)(self._mounts[config.role]).options(
            name=config.worker_id, namespace=NAMESPACE, lifetime="detached", **options
        )
        return RayWorker(actor_class.remote(config))

    def next_incarnation(self, worker_id: str) -> int:
        key = _incarnation_key(worker_id)
        last = internal_kv._internal_kv_get(key, namespace=KV_NAMESPACE)
        # Routers may outlive a fleet and Ray's store: a new fleet's first epoch must be higher than the last one they
        # know.
        incarnation = int(last) + 1 if last else max(1, int(self._clock()))
        internal_kv._internal_kv_put(key, str(incarnation), overwrite=True, namespace=KV_NAMESPACE)
        return incarnation

    def after_drain(self, worker_id: str) -> AfterDrain | None:
        value = internal_kv._internal_kv_get(_after_drain_key(worker_id), namespace=KV_NAMESPACE)
        return AfterDrain(value.decode()) if value else None

    def set_after_drain(self, worker_id: str, after_drain: AfterDrain | None) -> None:
        key = _after_drain_key(worker_id)
        if after_drain is None:
            internal_kv._internal_kv_del(key, namespace=KV_NAMESPACE)
        else:
            internal_kv._internal_kv_put(key, after_drain.value, overwrite=True, namespace=KV_NAMESPACE)

    def desired(self) -> DesiredState | None:
        value = internal_kv._internal_kv_get(DESIRED_KEY, namespace=KV_NAMESPACE)
        return from_json(DesiredState, value.decode()) if value else None

    def set_desired(self, desired: DesiredState) -> None:
        internal_kv._internal_kv_put(DESIRED_KEY, to_json(desired), overwrite=True, namespace=KV_NAMESPACE)

    def pins(self) -> dict[str, bytes]:
        return _values(_pin_key(""))

    def adapters(self) -> dict[str, bytes]:
        return _values(_adapter_key(""))

    def set_adapter(self, key: str, adapter: bytes | None) -> None:
        _put_or_delete(_adapter_key(key), adapter, "adapters")

    def set_pin(self, pin_id: str, pin: bytes | None) -> None:
        _put_or_delete(_pin_key(pin_id), pin, "pins")

    def request_nodes(self, placed: WorkerCounts) -> None:
        room = node_request_for(placed, self._roles)
        if room.bundles:
            internal_kv._internal_kv_put(NODE_REQUEST_KEY, "asked", overwrite=True, namespace=KV_NAMESPACE)
            request_resources(bundles=room.bundles, bundle_label_selectors=room.selectors)

    async def nodes(self) -> Nodes:
        try:
            return await asyncio.to_thread(_nodes_now)
        except ray.exceptions.RayError as error:
            raise PeerLost(f"Ray does not say which nodes leave: {_first_line(error)}") from error

    def forget(self) -> None:
        if internal_kv._internal_kv_get(NODE_REQUEST_KEY, namespace=KV_NAMESPACE):
            request_resources(bundles=[])
        for prefix in (
            _incarnation_key(""),
            _after_drain_key(""),
            _pin_key(""),
            _adapter_key(""),
            DESIRED_KEY,
            NODE_REQUEST_KEY,
        ):
            for key in internal_kv._internal_kv_list(prefix, namespace=KV_NAMESPACE):
                internal_kv._internal_kv_del(key, namespace=KV_NAMESPACE)


def _put_or_delete(key: str, value: bytes | None, kind: str) -> None:
    """Raises PeerLost where Ray's head does not answer."""
    try:
        if value is None:
            internal_kv._internal_kv_del(key, namespace=KV_NAMESPACE)
        else:
            internal_kv._internal_kv_put(key, value, overwrite=True, namespace=KV_NAMESPACE)
    except ray.exceptions.RayError as error:
        raise PeerLost(f"Ray's store of {kind} does not answer: {_first_line(error)}") from error


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


def _incarnation_key(worker_id: str) -> str:
    return f"incarnation/{worker_id}"


def _after_drain_key(worker_id: str) -> str:
    return f"after_drain/{worker_id}"


def _values(prefix: str) -> dict[str, bytes]:
    """Returns what is stored below a prefix, without it."""
    keys = sorted(internal_kv._internal_kv_list(prefix.encode(), namespace=KV_NAMESPACE))
    values = {key.decode(): internal_kv._internal_kv_get(key, namespace=KV_NAMESPACE) for key in keys}
    return {key.removeprefix(prefix): value for key, value in values.items() if value}


def _adapter_key(key: str) -> str:
    return f"adapter/{key}"


def _pin_key(pin_id: str) -> str:
    return f"pin/{pin_id}"


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
