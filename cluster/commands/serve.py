"""`twostroke serve`: flags to ClusterConfig. Every default is the one in `twostroke.config`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from cluster.flags import fleet, memory, model, ports, routing, scaling, security, tls, token, tracing
from cluster.launcher import serve
from twostroke.config import CacheConfig, ClusterConfig, ModelConfig, PatienceConfig, ScheduleConfig

Add = Callable[[argparse.ArgumentParser], None]


def _group(title: str, *adders: Callable[[argparse._ActionsContainer], None]) -> Add:
    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(title)
        for each in adders:
            each(group)

    return add


SECTIONS: dict[str, Add] = {
    "fleet": _group("fleet", fleet.add_counts, ports.add_fleet, token.add),
    "workers": _group("workers", fleet.add_workers),
    "ports": _group("workers' ports", ports.add_workers),
    "routers": _group("routers", fleet.add_routers),
    "ray": _group("ray", fleet.add_ray),
    "model": _group("model", model.add),
    "routing": _group("routing", routing.add),
    "cache": _group("memory", memory.add_cache),
    "schedule": _group("schedule", memory.add_schedule),
    "scaling": scaling.add,
    "security": security.add,
    "tracing": tracing.add,
}
"""Of `serve --help`, and of the cluster file (`cluster.file.keys`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for add in SECTIONS.values():
        add(parser)


def config_from(args: argparse.Namespace) -> ClusterConfig:
    """Raises ConfigError that names the flag."""
    return ClusterConfig(
        prefill=args.prefill,
        decode=args.decode,
        routers=args.routers,
        address=args.address,
        ray_wait_s=args.ray_wait,
        token_file=args.token_file,
        fleet_port=args.fleet_port,
        ports=ports.config_from(args),
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        threads=args.threads,
        pin=args.pin,
        borrow=args.borrow,
        transports=None if args.transports is None else tuple(args.transports.split(",")),
        policy=args.policy,
        seed=args.seed,
        slo_ttft_s=args.slo_ttft,
        max_held=args.max_held,
        orphan_grace_s=args.orphan_grace,
        request_log=None if args.request_log is None else str(Path(args.request_log).absolute()),
        public_prefixes=tuple(str(Path(file).absolute()) for file in args.public_prefix),
        doors=security.doors_from(args),
        tracing=tracing.config_from(args),
        tls=tls.doors_from(args),
        cluster_tls=tls.cluster_from(args),
        unencrypted_nixl=args.unencrypted_nixl,
        patience=PatienceConfig(suspect_after_s=args.suspect_after, dead_after_s=args.dead_after),
        model=ModelConfig(
            model=args.model,
            dtype=args.dtype,
            weights=args.weights,
            max_model_len=args.max_model_len,
            served_model_name=args.served_model_name,
            deterministic=args.deterministic,
            device=args.device,
        ),
        cache=CacheConfig(block_size=args.block_size, kv_cache_memory_bytes=args.kv_cache_memory),
        schedule=ScheduleConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            step_target_s=args.step_target_ms / 1e3,
            takeover=args.takeover,
        ),
        scaling=scaling.config_from(args),
    )


def run(args: argparse.Namespace) -> int:
    return serve(config_from(args))
