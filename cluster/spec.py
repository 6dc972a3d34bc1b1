"""What the supervisor keeps alive, and what the router is told, derived from one ClusterConfig."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from twostroke.config import ClusterConfig, Role, RouterConfig, WorkerConfig

NODE_ADDRESS = ""
"""As a worker's host: the address of whichever Ray node the actor is on (known only there)."""

LOOPBACK = "127.0.0.1"
NAMESPACE = "twostroke"
"""Ray namespace of all our actors; one fleet per Ray cluster."""
SUPERVISOR = "supervisor"
"""Name of the supervisor's actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Who shall be alive, and where the Fleet service listens."""

    workers: tuple[WorkerConfig, ...]
    host: str = LOOPBACK
    port: int = 0
    """Fixed for the supervisor's lives, so that routers find a restarted one. 0 (any) is for tests."""
    token: str = field(default="", repr=False)


def fleet_spec(config: ClusterConfig, *, token: str, port: int) -> FleetSpec:
    joined = config.address is not None
    host = NODE_ADDRESS if joined else LOOPBACK
    counts = ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode))
    # Which workers will share a GPU is not known here; one GPU for all is what must work.
    cache = replace(config.cache, device_share=config.cache.device_share / (config.prefill + config.decode))
    workers = tuple(
        WorkerConfig(
            role=role,
            worker_id=f"{role}-{index}",
            host=host,
            cluster_token=token,
            model=config.model,
            cache=cache,
            schedule=config.schedule,
            threads=config.threads,
            pin=config.pin,
            borrow=config.borrow,
            transports=config.transports,
        )
        for role, count in counts
        for index in range(count)
    )
    return FleetSpec(workers=workers, host=host, port=port, token=token)


def router_config(config: ClusterConfig, *, token: str, fleet_address: str, model_dir: str) -> RouterConfig:
    return RouterConfig(
        host=config.host,
        http_port=config.http_port,
        grpc_port=config.grpc_port,
        fleet_address=fleet_address,
        cluster_token=token,
        model_dir=model_dir,
        served_model_name=config.model.public_name,
        policy=config.policy,
        seed=config.seed,
        slo_ttft_s=config.slo_ttft_s,
        max_held=config.max_held,
        request_log=config.request_log,
    )
