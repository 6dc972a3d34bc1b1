"""Starts a local Ray cluster that ends with this process, or joins a running one; the supervisor is an actor in it.

Import it only after a function of `cluster.ray.environment` has set what Ray reads while it is imported.
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

from cluster.ray.backend import RayBackend
from cluster.ray.local_node import local_nodes
from cluster.supervisor.supervisor import Supervisor
from cluster.values.placement import HEAD_RESOURCE, HEAD_RESOURCE_SHARE, Node, nodes_from_ray
from cluster.values.spec import NAMESPACE, SUPERVISOR, FleetSpec
from twostroke.base.errors import ConfigError, NotFound, PeerLost
from twostroke.observability.telemetry import configure_logging

JOIN_PAUSE_S = 1.0
SPEC_S = 60.0
"""Seconds for a supervisor that is being restarted to answer."""
OBJECT_STORE_BYTES = 80_000_000
"""Size of Ray's object store, which carries neither tokens nor pages. Its default is 30 % of the memory."""


class SupervisorActor(Supervisor):
    """The actor. It begins by itself, because Ray restarts it after the head's death and a launcher may be away.

    Ray constructs it on the event loop that its methods run on.
    """

    def __init__(self, spec: FleetSpec) -> None:
        configure_logging("supervisor", owns_files=True)
        worker_count = sum(bounds.most for bounds in spec.bounds)
        super().__init__(spec, RayBackend(worker_count=worker_count, roles=spec.roles))
        self.begin()


def start_local(folder: Path, num_cpus: int = 0) -> None:
    """Starts a local Ray cluster with all its files below `folder`. Its processes die with this process.

    `num_cpus`: what our actors ask for, usually none. Ray starts an idle process for each CPU that it has.
    """
    try:
        with local_nodes():
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
    except Exception as error:  # Ray raises all kinds, bare Exception among them
        raise ConfigError(f"Ray cannot be started on this machine: {error}") from error
    _silence()


def join(address: str, wait_s: float = 0.0) -> None:
    """Joins a cluster. A head's port answers before its node can be joined, so this is retried for `wait_s`."""
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
    """Awaits the end of Ray's node on this host, which carries all calls. A restarted one needs `rejoin`."""
    reader, writer = await asyncio.open_unix_connection(ray._private.worker.global_worker.node.raylet_socket_name)
    try:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)  # it never says anything
    finally:
        writer.close()


def rejoin(address: str) -> Any:
    """Returns the supervisor, through another node.

    Raises ConfigError where there is none yet, PeerLost where it is gone.
    """
    ray.shutdown()
    join(address)
    supervisor = running_supervisor()
    if supervisor is None:
        raise PeerLost("the fleet is gone: Ray's head has forgotten it, or somebody else took it down")
    return supervisor


def leave() -> None:
    """Leaves Ray. A local cluster ends; a joined one does not notice."""
    ray.shutdown()


def create_supervisor(spec: FleetSpec) -> Any:
    """Creates the named actor of the supervisor on the head node."""
    if running_supervisor() is not None:
        raise ConfigError(
            "this Ray cluster already has a twostroke fleet; end it with: twostroke down --address", field="--address"
        )
    # Routers know its address, so it stays on the head node, without which there is no cluster anyway. A restarted head
    # is another node for Ray and has this resource too.
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
    """Returns what a running fleet was started with. Waits for a supervisor that is being restarted."""
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
    """Kills workers without their supervisor; returns those that were still there."""
    killed = []
    for name in names:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
            killed.append(name)
    return killed


def restart(supervisor: Any) -> None:
    """Kills the supervisor's process; Ray starts it again."""
    ray.kill(supervisor, no_restart=False)


async def wait_until_alive(supervisor: Any) -> None:
    await supervisor.snapshot.options(max_task_retries=-1).remote()


def _silence() -> None:
    """Silences the paragraphs of advice that Ray prints for each death, whatever `log_to_driver` is."""
    worker = ray._private.worker.global_worker
    worker.threads_stopped.set()
    worker.gcs_error_subscriber.close()
