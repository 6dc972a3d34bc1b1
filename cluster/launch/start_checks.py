"""Checks what a cluster needs before anything is started. Each check raises ConfigError that names the flag."""

from __future__ import annotations

import math
import os
from pathlib import Path

from cluster import ports
from cluster.branches import FURTHER_MODELS
from cluster.flags.checks import file_can_be_made
from cluster.flags.tls import check as check_tls
from cluster.flags.token import read as read_token
from cluster.values.placement import Node, first_unplaceable, gpus_of, processes_of, with_gpus
from cluster.values.spec import LOOPBACK, router_ports
from router.auth.key_authenticator import read_keys
from twostroke.base.errors import ConfigError
from twostroke.config import ClusterConfig, Role
from twostroke.engine.cores.cores import check_threads
from twostroke.kv_cache.memory import available_memory_bytes
from twostroke.kv_cache.pool_size import refuse_more_than_free
from twostroke.transfer.registry import check_names

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
RAY_LABEL_PREFIX = "ray.io/"
"""Prefix of the labels that Ray gives to nodes by itself."""


def check(config: ClusterConfig) -> None:
    """Checks the config and the files that it names."""
    router_ports(config)
    if config.runtime.transports is not None:
        check_names(config.runtime.transports)
    if config.ports.are_fixed and config.address is None and config.prefill + config.decode > 1:
        raise ConfigError(
            f"workers with fixed ports need a node each, and this machine would run {config.prefill + config.decode}; "
            "remove `ports`, or join a Ray cluster with --address",
            field="ports",
        )
    _check_disk_folder(config)
    check_tls(config.certificates)
    if config.token_file is not None:
        read_token(config.token_file)
    if config.endpoints.api_keys is not None:
        read_keys(config.endpoints.api_keys)
    if config.routers:
        file_can_be_made("--request-log", config.routing.request_log)
        for file in config.routing.public_prefixes:
            _check_readable("--public-prefix", file)


def check_machine(config: ClusterConfig) -> None:
    """Checks this machine for a whole cluster, or for its routers only if the workers run on other nodes."""
    for router in router_ports(config):
        ports.check_endpoints(config.listen.host, config.endpoints.metrics_host, router.by_flag())
    if config.address is not None:
        return
    ports.check(LOOPBACK, "--fleet-port", config.fleet_port)
    _check_memory(config)
    model, _ = config.of_workers
    for role in (Role.PREFILL, Role.DECODE):
        own = config.role(role).threads
        if not model.is_paced:
            flag = "--threads" if own is None else f"{role.value}.threads"
            check_threads(own or config.runtime.threads, flag, processes_of(model, role))
    _check_room(config)


def cpus(config: ClusterConfig) -> int:
    """Returns the CPUs that a local Ray must have for our workers."""
    asked = config.prefill * config.prefill_role.num_cpus + config.decode * config.decode_role.num_cpus
    return min(math.ceil(asked), os.cpu_count() or 1)


def _check_disk_folder(config: ClusterConfig) -> None:
    folder = config.cache.disk_cache_dir
    if folder is not None and not config.cache.disk_cache_bytes:
        raise ConfigError(
            f"--disk-cache-dir {folder} would be ignored: say with --disk-cache how much may be kept there",
            field="cache.disk_cache_dir",
        )


def _check_readable(flag: str, file: str) -> None:
    try:
        Path(file).open("rb").close()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}", field=flag) from error


def _check_room(config: ClusterConfig) -> None:
    """Checks that all workers fit on this machine: a local Ray gets no further node to wait for."""
    gpus = len(list(NVIDIA_GPUS.glob("*"))) if NVIDIA_DRIVER.exists() else 0
    resources = {"CPU": float(cpus(config)), "GPU": float(gpus), "memory": float(available_memory_bytes())}
    here = [Node("", LOOPBACK, {}, resources)]
    demands = [
        (role, with_gpus(here, config.role(role), gpus_of(config.model, role)), count) for role, count in config.counts
    ]
    ray_labels = {
        key: value
        for _, demand, _ in demands
        for key, value in demand.labels.items()
        if key.startswith(RAY_LABEL_PREFIX)
    }
    wrong = first_unplaceable([Node("", LOOPBACK, ray_labels, resources)], demands)
    if wrong is not None:
        role, unplaceable = wrong
        raise ConfigError(
            f"{unplaceable.why} (on this machine, because --address is not given)",
            field=f"{role.value}.{unplaceable.key}",
        )


def _check_memory(config: ClusterConfig) -> None:
    """Checks the memory of all workers together. Workers that start side by side each see the same free memory."""
    if config.model.device != "cpu" and not config.model.is_paced and NVIDIA_DRIVER.exists():
        return  # their pages may be on a GPU, which only workers can inspect
    workers, each_bytes = config.prefill + config.decode, config.cache.host_bytes + config.cache.host_cache_bytes
    flag = "--kv-cache-memory and --host-cache" if config.cache.host_cache_bytes else "--kv-cache-memory"
    free_bytes = available_memory_bytes()
    refuse_more_than_free(each_bytes, free_bytes, workers=workers, flag=flag)
    for further in FURTHER_MODELS:
        further.check_memory(config, free_bytes - workers * each_bytes)
