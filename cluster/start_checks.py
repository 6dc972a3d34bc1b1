"""What a cluster needs before anything of it is started. Each check raises ConfigError that names the flag."""

from __future__ import annotations

import math
import os
from pathlib import Path

from cluster import ports
from cluster.checks import file_can_be_made
from cluster.flags import tls
from cluster.flags.token import read as read_token
from cluster.placement import Node, first_misfit
from cluster.spec import LOOPBACK, router_ports
from router.frontend.auth.auth import read_keys
from twostroke.config import ClusterConfig, Role
from twostroke.engine.cores import check_threads
from twostroke.errors import ConfigError
from twostroke.kv_cache.memory import available_memory_bytes
from twostroke.transfer.registry import check_names

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
RAYS_OWN = "ray.io/"
"""Labels that Ray gives to nodes by itself begin with this."""


def check(config: ClusterConfig) -> None:
    """The config in itself, and the files that it names."""
    router_ports(config)
    if config.runtime.transports is not None:
        check_names(config.runtime.transports)
    if config.ports.are_fixed and config.address is None and config.prefill + config.decode > 1:
        raise ConfigError(
            f"fixed ports of workers are for one worker per node, and this machine would have "
            f"{config.prefill + config.decode}; leave them out, or join nodes of a Ray cluster with --address",
            field="ports",
        )
    tls.check(config.certificates)
    if config.token_file is not None:
        read_token(config.token_file)
    if config.endpoints.api_keys is not None:
        read_keys(config.endpoints.api_keys)
    if config.routers:
        file_can_be_made("--request-log", config.routing.request_log)
        for file in config.routing.public_prefixes:
            _check_readable("--public-prefix", file)


def check_machine(config: ClusterConfig) -> None:
    """This machine, for all of a cluster; for its routers only, where there are other nodes for workers."""
    for router in router_ports(config):
        ports.check_endpoints(config.listen.host, config.endpoints.metrics_host, router.by_flag())
    if config.address is not None:
        return
    ports.check(LOOPBACK, "--fleet-port", config.fleet_port)
    _check_memory(config)
    for role in (Role.PREFILL, Role.DECODE):
        own = config.role(role).threads
        if not config.model.is_paced:
            check_threads(own or config.runtime.threads, "--threads" if own is None else f"{role.value}.threads")
    _check_room(config)


def cpus(config: ClusterConfig) -> int:
    """That a Ray of our own has to have for our workers."""
    asked = config.prefill * config.prefill_role.num_cpus + config.decode * config.decode_role.num_cpus
    return min(math.ceil(asked), os.cpu_count() or 1)


def _check_readable(flag: str, file: str) -> None:
    try:
        Path(file).open("rb").close()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}", field=flag) from error


def _check_room(config: ClusterConfig) -> None:
    """On the one node of a Ray of our own. Nobody adds another one: what does not fit would wait for ever."""
    gpus = len(list(NVIDIA_GPUS.glob("*"))) if NVIDIA_DRIVER.exists() else 0
    resources = {"CPU": float(cpus(config)), "GPU": float(gpus), "memory": float(available_memory_bytes())}
    asks = [(role, config.role(role), count) for role, count in config.counts]
    its_own = {key: value for _, asked, _ in asks for key, value in asked.labels.items() if key.startswith(RAYS_OWN)}
    wrong = first_misfit([Node("", LOOPBACK, its_own, resources)], asks)
    if wrong is not None:
        role, misfit = wrong
        raise ConfigError(f"{misfit.why} (this machine, as there is no --address)", field=f"{role.value}.{misfit.key}")


def _check_memory(config: ClusterConfig) -> None:
    """Workers that start side by side would each find enough for itself, and none would be left for the last."""
    if config.model.device != "cpu" and not config.model.is_paced and NVIDIA_DRIVER.exists():
        return  # their pages may lie on a GPU, which only they can look at
    workers, each_bytes = config.prefill + config.decode, config.cache.host_bytes
    wanted, available = workers * each_bytes, available_memory_bytes()
    if wanted > available:
        raise ConfigError(
            f"--kv-cache-memory: {workers} workers with {each_bytes} bytes of pages each need "
            f"{wanted}, but only {available} are available",
            field="--kv-cache-memory",
        )
