"""`twostroke drain --node` makes Ray place nothing more on a node, and the fleet's workers leave it.

The command tells Ray. The supervisor watches nodes and drains their workers, so it may be down at this moment.
Call a function of `environment` before importing this.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import ray
import ray.exceptions
from ray.core.generated import autoscaler_pb2

from cluster.ray import session as ray_session
from cluster.supervisor.reconcile.plan import WorkerStage
from cluster.supervisor.view import FleetSnapshot
from cluster.values.placement import Node, nodes_from_ray
from twostroke.base.errors import ConfigError, NotFound, PeerLost

HERE = "here"
"""Stands for the node of the machine or pod in which the command runs."""
AFTER_DEADLINE_S = 10.0
"""Seconds after the deadline for workers that were cut off to end."""


def leave_node(address: str, wanted: str, deadline_s: float) -> tuple[str, ...]:
    """Drains a node. Returns the names of its workers once all have left.

    Raises NotFound where Ray has no such node, and ConfigError where it is Ray's head. Raises PeerLost where Ray
    refuses, or where workers stay past the deadline.
    """
    ray_session.join(address)
    try:
        node = _node_meant(nodes_from_ray(ray.nodes()), wanted)
        _tell_ray(node, deadline_s)
        return _until_left(node, time.monotonic() + deadline_s + AFTER_DEADLINE_S)
    except ray.exceptions.RayError as error:
        raise PeerLost(f"Ray at {address} does not answer: {error}") from error
    finally:
        ray_session.leave()


def _node_meant(nodes: Sequence[Node], wanted: str) -> Node:
    here = ray.get_runtime_context().get_node_id() if wanted == HERE else None
    found = [node for node in nodes if here == node.node_id or wanted in (node.node_id, node.address)]
    if len(found) != 1:
        known = ", ".join(f"{node.address} ({node.node_id})" for node in nodes)
        raise NotFound(
            f"--node {wanted}: {len(found)} nodes that are alive have this address or id; the nodes are {known}",
            field="--node",
        )
    if found[0].is_head:
        raise ConfigError(f"--node {wanted} is Ray's head: the supervisor runs there and cannot move", field="--node")
    return found[0]


def _tell_ray(node: Node, deadline_s: float) -> None:
    is_accepted, why = ray._private.worker.global_worker.gcs_client.drain_node(
        node.node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "twostroke drain",
        math.ceil((time.time() + deadline_s) * 1000),
    )
    if not is_accepted:
        raise PeerLost(f"Ray refuses to drain the node {node.address}: {why}")


def _until_left(node: Node, until_s: float) -> tuple[str, ...]:
    try:
        supervisor = ray_session.find_supervisor()
    except NotFound:
        return ()  # without a fleet there are no workers here
    snapshots = supervisor.snapshot.options(max_task_retries=-1)
    left: dict[str, None] = {}
    here: list[str] = []
    version = -1
    while time.monotonic() < until_s:
        snapshot: FleetSnapshot = ray.get(snapshots.remote(version), timeout=AFTER_DEADLINE_S)
        version, here = snapshot.version, _workers_on(snapshot, node)
        if not here:
            return tuple(left)
        left.update(dict.fromkeys(here))
    raise PeerLost(f"after the deadline, {', '.join(here)} are still on {node.address}")


def _workers_on(snapshot: FleetSnapshot, node: Node) -> list[str]:
    """Returns the workers on the node that still serve or drain."""
    return [
        worker.config.worker_id
        for worker in snapshot.workers
        if worker.place is not None
        and worker.place.node_id == node.node_id
        and worker.observed.stage in (WorkerStage.SERVING, WorkerStage.DRAINING)
    ]
