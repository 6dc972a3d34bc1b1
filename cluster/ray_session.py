"""Our hold on Ray: a cluster of our own that ends with us, or a running one that we join.

Import it after a function of `ray_environment` was called.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from cluster.placement import HEAD_RESOURCE, HEAD_RESOURCE_SHARE, Node, nodes_from_ray
from cluster.spec import NAMESPACE, SUPERVISOR, FleetSpec
from cluster.supervisor import SupervisorActor
from twostroke.errors import ConfigError, NotFound, PeerLost

JOIN_PAUSE_S = 1.0
SPEC_S = 60.0
"""For a supervisor that is being restarted to answer."""
OBJECT_STORE_BYTES = 80_000_000
"""Ray carries neither tokens nor pages; its default would take 30 % of the memory."""


def start_local(folder: Path, num_cpus: int = 0) -> None:
    """A Ray cluster of our own, with all its files below `folder`. Its processes die with this process.

    `num_cpus`: what our actors ask for, which usually is none. Ray starts an idle process for each one that it has.
    """
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
    except Exception as error:  # a node that does not come up raises all kinds, bare Exception among them
        raise ConfigError(f"Ray cannot be started on this machine: {error}") from error
    _silence()


def join(address: str, wait_s: float = 0.0) -> None:
    """A head's port answers before its node is there to be joined: then it is tried again for `wait_s`."""
    until_s = time.monotonic() + wait_s
    while True:
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
            break
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            if not isinstance(error, ConnectionError) or time.monotonic() >= until_s:
                raise ConfigError(
                    f"cannot join the Ray cluster at {address}: {error}; does it have the same token "
                    "(RAY_AUTH_TOKEN_PATH), TLS (RAY_USE_TLS) and version of Ray?",
                    field="--address",
                ) from error
        time.sleep(JOIN_PAUSE_S)
    _silence()


async def until_node_ends() -> None:
    """Ray's node of this host, through which everything goes. Where it began again, it is another one: see `rejoin`."""
    reader, writer = await asyncio.open_unix_connection(ray._private.worker.global_worker.node.raylet_socket_name)
    try:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)  # it never says anything
    finally:
        writer.close()


def rejoin(address: str) -> Any:
    """The supervisor, through another node. Raises ConfigError where there is none yet, PeerLost where it is gone."""
    ray.shutdown()
    join(address)
    supervisor = running_supervisor()
    if supervisor is None:
        raise PeerLost("the fleet is gone: Ray's head has forgotten it, or somebody else took it down")
    return supervisor


def leave() -> None:
    """Ends a local cluster; a joined one does not notice."""
    ray.shutdown()


def create_supervisor(spec: FleetSpec) -> Any:
    """The named supervisor's actor, on the head node."""
    if running_supervisor() is not None:
        raise ConfigError(
            "this Ray cluster already has a twostroke fleet; end it with: twostroke down --address", field="--address"
        )
    # Routers know its address, and without the head node there is no cluster anyway: so nowhere else. A head that was
    # restarted is another node for Ray, with this resource all the same.
    on_head = {HEAD_RESOURCE: HEAD_RESOURCE_SHARE}
    return (
        ray.remote(max_restarts=-1, max_task_retries=0)(SupervisorActor)
        .options(name=SUPERVISOR, namespace=NAMESPACE, lifetime="detached", num_cpus=0, resources=on_head)
        .remote(spec)
    )


def running_supervisor() -> Any | None:
    try:
        return ray.get_actor(SUPERVISOR, namespace=NAMESPACE)
    except ValueError:
        return None


def find_supervisor() -> Any:
    supervisor = running_supervisor()
    if supervisor is None:
        raise NotFound("this Ray cluster has no twostroke fleet")
    return supervisor


def spec_of(supervisor: Any) -> FleetSpec:
    """What a running fleet was started with. Waits for a supervisor that is being restarted."""
    try:
        spec: FleetSpec = ray.get(supervisor.spec.options(max_task_retries=-1).remote(), timeout=SPEC_S)
    except ray.exceptions.RayError as error:
        raise PeerLost(f"the fleet's supervisor does not answer: {next(iter(str(error).splitlines()), '')}") from error
    return spec


def living_nodes() -> list[Node]:
    return nodes_from_ray(ray.nodes())


def remove(supervisor: Any) -> None:
    ray.kill(supervisor, no_restart=True)


def remove_workers(names: Sequence[str]) -> list[str]:
    """Kill them without their supervisor. Returns those that were still there."""
    killed = []
    for name in names:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
            killed.append(name)
    return killed


def restart(supervisor: Any) -> None:
    """End its life; Ray begins another one."""
    ray.kill(supervisor, no_restart=False)


async def wait_until_alive(supervisor: Any) -> None:
    await supervisor.snapshot.options(max_task_retries=-1).remote()


def _silence() -> None:
    """Whatever `log_to_driver` says, Ray prints paragraphs of advice for each death; we tell of it in our own words."""
    worker = ray._private.worker.global_worker
    worker.threads_stopped.set()
    worker.gcs_error_subscriber.close()
