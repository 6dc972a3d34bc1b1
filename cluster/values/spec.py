"""Derives from one ClusterConfig what the supervisor keeps alive and what the routers are started with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.ports import check_distinct
from cluster.values.placement import gpus_of
from cluster.values.worker_counts import LatencyTargets, WorkerCounts
from twostroke.base.credentials import TlsConfig
from twostroke.config import Bounds, ClusterConfig, Role, RoleConfig, RouterConfig, ScalingConfig, WorkerConfig
from twostroke.config.settings import Settings

NODE_ADDRESS = ""
"""A worker's host that stands for the address of the Ray node its actor is on, which is known only there."""

LOOPBACK = "127.0.0.1"
NAMESPACE = "twostroke"
"""Ray namespace of all our actors; there is one fleet per Ray cluster."""
SUPERVISOR = "supervisor"
"""Name of the supervisor's actor."""
LAUNCHED_GRACE_S = 3.0
"""Seconds that a launched router gives open requests after SIGTERM: whoever stops a server waits for its launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """The workers a fleet starts with, and the address of its Fleet service."""

    workers: tuple[WorkerConfig, ...]
    host: str = LOOPBACK
    port: int = 0
    """Port that stays the same when the supervisor restarts, so that routers find it again. 0 (any) is for tests."""
    token: str = field(default="", repr=False)
    tls: TlsConfig | None = None
    """Certificates of all processes of the cluster; the files are on every host."""
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    slo_ttft_s: float | None = None
    roles: Mapping[Role, RoleConfig] = field(default_factory=dict)
    """What workers ask of nodes, and their threads. A missing role asks for nothing in particular."""

    @property
    def identity(self) -> str:
        """A digest that tells this fleet from earlier and later fleets on the same Ray cluster."""
        text = f"{self.token} {' '.join(worker.worker_id for worker in self.workers)}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def counts(self) -> WorkerCounts:
        """Workers of each role at the start."""
        prefill = sum(worker.role is Role.PREFILL for worker in self.workers)
        return WorkerCounts(prefill, len(self.workers) - prefill)

    @property
    def bounds(self) -> tuple[Bounds, Bounds]:
        """Bounds of prefill and of decode workers."""
        counts = self.counts
        return self.scaling.prefill_bounds(counts.prefill), self.scaling.decode_bounds(counts.decode)

    @property
    def scales(self) -> bool:
        return self.scaling.scales(*self.counts.pair)

    @property
    def flexible(self) -> bool:
        return self.scaling.may_switch(*self.counts.pair)

    @property
    def promise(self) -> LatencyTargets:
        return LatencyTargets(ttft_s=self.slo_ttft_s, itl_s=self.scaling.slo_itl_s)

    def worker(self, worker_id: str, role: Role) -> WorkerConfig:
        """Returns the config of a worker of the start, or of an additional worker like those."""
        alike_first = sorted(self.workers, key=lambda each: (each.worker_id != worker_id, each.role is not role))
        like, threads = alike_first[0], alike_first[0].runtime.threads
        if worker_id != like.worker_id and role in self.roles:
            threads = self.roles[role].threads or threads
        return like.replace(worker_id=worker_id, role=role, runtime=like.runtime.replace(threads=threads))

    def is_as(self, other: FleetSpec) -> bool:
        """Returns whether both have the same configuration but for token and port, which are drawn at launch."""
        return self._undrawn() == other._undrawn()

    def _undrawn(self) -> FleetSpec:
        return replace(
            self, workers=tuple(worker.replace(cluster_token="") for worker in self.workers), token="", port=0
        )


def fleet_spec(config: ClusterConfig, *, token: str, port: int) -> FleetSpec:
    joined = config.address is not None
    host = NODE_ADDRESS if joined else LOOPBACK
    # Which workers will share a GPU is not known here; one GPU for all is what must work. A worker of several GPUs
    # shares none.
    scaling = config.scaling
    most = scaling.prefill_bounds(config.prefill).most + scaling.decode_bounds(config.decode).most
    model, cache = config.of_workers
    shared = cache.replace(device_share=cache.device_share / most)
    workers = tuple(
        WorkerConfig(
            role=role,
            worker_id=f"{role}-{index}",
            flexible=scaling.may_switch(config.prefill, config.decode),
            host=host,
            cluster_token=token,
            cluster_tls=config.certificates.cluster,
            slo_ttft_s=config.routing.slo_ttft_s,
            slo_itl_s=scaling.slo_itl_s,
            **_groups_of(
                config,
                WorkerConfig,
                model=model,
                cache=cache if gpus_of(model, role) > 1 else shared,
                runtime=config.runtime.replace(threads=config.role(role).threads or config.runtime.threads),
            ),
        )
        for role, count in config.counts
        for index in range(count)
    )
    return FleetSpec(
        workers=workers,
        host=host,
        port=port,
        token=token,
        tls=config.certificates.cluster,
        roles={
            role: config.role(role).replace(threads=config.role(role).threads or config.runtime.threads)
            for role, _ in config.counts
        },
        scaling=scaling,
        slo_ttft_s=config.routing.slo_ttft_s,
    )


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """Ports of one router; 0 means any free port. All routers of a launcher have the same ones for clients."""

    http: int
    grpc: int
    admin: int
    metrics: int | None
    """Port of the metrics; None means that they have no port of their own."""

    def by_flag(self) -> dict[str, int]:
        return {"--http-port": self.http, "--grpc-port": self.grpc, **self.own_by_flag()}

    def own_by_flag(self) -> dict[str, int]:
        """Returns the ports that no other router has."""
        admin = {"--admin-port": self.admin}
        return admin if self.metrics is None else {**admin, "--metrics-port": self.metrics}


def router_ports(config: ClusterConfig) -> list[RouterPorts]:
    """Returns each router's ports: those for clients are shared, those for operators count up from the first router's.

    Several routers have ports of their own for metrics, as a scraper must know whose it reads. Raises ConfigError where
    two ports are equal.
    """
    listen, endpoints, of_routers = config.listen, config.endpoints, []
    # On other machines the Fleet service may have the same port.
    taken = {config.fleet_port: "--fleet-port"} if config.address is None else {}
    suffix = f" for some of the {config.routers} routers" if config.routers > 1 else ""
    first_metrics = 0 if endpoints.metrics_port is None and config.routers > 1 else endpoints.metrics_port
    for index in range(config.routers):
        admin = endpoints.admin_port + index if endpoints.admin_port else 0
        metrics = first_metrics + index if first_metrics else first_metrics
        ports = RouterPorts(listen.http_port, listen.grpc_port, admin, metrics)
        check_distinct(ports.by_flag() if index == 0 else ports.own_by_flag(), taken, suffix)
        of_routers.append(ports)
    return of_routers


def router_configs(config: ClusterConfig, *, token: str, fleet_address: str, model_dir: str) -> list[RouterConfig]:
    return [
        RouterConfig(
            fleet_address=fleet_address,
            cluster_token=token,
            tls=config.certificates.clients,
            cluster_tls=config.certificates.cluster,
            model_dir=model_dir,
            served_model_name=config.model.public_name,
            number=index,
            drain_grace_s=LAUNCHED_GRACE_S,
            **_groups_of(
                config,
                RouterConfig,
                listen=config.listen.replace(http_port=ports.http, grpc_port=ports.grpc),
                endpoints=config.endpoints.replace(admin_port=ports.admin, metrics_port=ports.metrics),
            ),
        )
        for index, ports in enumerate(router_ports(config))
    ]


def _groups_of(config: ClusterConfig, kind: type[WorkerConfig | RouterConfig], **own: Settings) -> dict[str, Any]:
    """Returns a process's groups of settings: the cluster's of the same names, and its `own` in their place."""
    return {name: value for name, value in config if name in kind.model_fields} | own
