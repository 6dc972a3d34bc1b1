"""`twostroke router`: a router that nobody looks after but the system's own supervisor, or Kubernetes.

Flags and environment tell it everything. It finds workers through the Fleet service, and waits, not ready, for as long
as that is not there.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from cluster import ports
from cluster.announce import fetch_with_progress
from cluster.flags import fleet, routing, security, tls, token, tracing
from cluster.flags.defaults import with_default
from cluster.spec import RouterPorts
from router.__main__ import run as run_router
from twostroke.config import ModelConfig, PatienceConfig, RouterConfig
from twostroke.errors import ConfigError
from twostroke.models.catalog import TOKENIZER_FILES, locate

GRACE_S = 25.0
"""Kubernetes kills after thirty, unless it is told otherwise."""
EVERY_INTERFACE = ("0.0.0.0", "::", "[::]")
ELSEWHERE = ("192.0.2.1", 9)
"""An address that is nobody's: no packet is sent to find the way there."""
MODEL = ModelConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fleet")
    group.add_argument(
        "--fleet", required=True, metavar="HOST:PORT", help="the Fleet service: Ray's head, and `serve --fleet-port`"
    )
    token.add(group)
    fleet.add_doors(group)
    security.add(parser)
    group.add_argument(
        "--peer-host",
        default="",
        metavar="HOST",
        help="how other routers reach this one (default: --host, or the address that leads to the fleet)",
    )
    group.add_argument(
        "--peer-port",
        type=int,
        default=0,
        metavar="PORT",
        help="where other routers reach this one over TLS, with --cluster-tls-cert (default: any free one)",
    )
    group.add_argument(
        "--rank", type=int, default=0, metavar="N", help=with_default("of this router among those with one --seed")
    )
    group.add_argument(
        "--grace", type=float, default=GRACE_S, metavar="SECONDS", help=with_default("for open requests after SIGTERM")
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        default=MODEL.model,
        help=with_default("as the fleet's: its tokenizer is needed, or a directory that has it"),
    )
    model.add_argument("--dtype", default=MODEL.dtype, help=with_default("as the fleet's"))
    model.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: as --model)")
    routing.add(parser.add_argument_group("routing"))
    tracing.add(parser)


def run(args: argparse.Namespace) -> int:
    return run_router(lambda: config_from(args))


def config_from(args: argparse.Namespace) -> RouterConfig:
    """Raises ConfigError that names the flag."""
    host, port = _host_and_port(args.fleet)
    doors, own_tls, cluster_tls = security.doors_from(args), tls.doors_from(args), tls.cluster_from(args)
    if args.token_file is None:
        raise ConfigError(
            f"--token-file (or ${token.VARIABLE}) is missing: the file with the fleet's secret", field="--token-file"
        )
    by_flag = RouterPorts(args.http_port, args.grpc_port, doors.admin_port, doors.metrics_port).by_flag()
    ports.check_distinct({**by_flag, "--peer-port": args.peer_port}, {})
    tls.check(own_tls, cluster_tls)
    model = ModelConfig(model=args.model, dtype=args.dtype, served_model_name=args.served_model_name)
    config = RouterConfig(
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        doors=doors,
        tls=own_tls,
        cluster_tls=cluster_tls,
        fleet_address=args.fleet,
        peer_host=args.peer_host or _own_address(args.host, host, port),
        cluster_token=token.read(args.token_file),
        model_dir=_tokenizer_dir(model),
        served_model_name=model.public_name,
        peer_port=args.peer_port,
        rank=args.rank,
        drain_grace_s=args.grace,
        policy=args.policy,
        seed=args.seed,
        slo_ttft_s=args.slo_ttft,
        max_held=args.max_held,
        request_log=args.request_log,
        public_prefixes=tuple(args.public_prefix),
        tracing=tracing.config_from(args),
        patience=PatienceConfig(suspect_after_s=args.suspect_after, dead_after_s=args.dead_after),
    )
    ports.check_doors(config.host, doors.metrics_host, by_flag)
    return config


def _host_and_port(address: str) -> tuple[str, int]:
    host, _colon, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--fleet must be HOST:PORT of the Fleet service, got {address!r}", field="--fleet")
    return host.strip("[]"), int(port)


def _own_address(listening: str, fleet_host: str, fleet_port: int) -> str:
    """Empty where `listening` is an address already. The fleet's name may not be known yet: then any way out."""
    if listening not in EVERY_INTERFACE:
        return ""
    for target in ((fleet_host, fleet_port), ELSEWHERE):
        try:
            family, _kind, _protocol, _name, address = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
        except OSError:
            continue
        return f"[{own}]" if ":" in own else own
    return ""


def _tokenizer_dir(model: ModelConfig) -> str:
    """Fetched first if need be; empty for a paced model, whose text is bytes."""
    if model.is_paced:
        return ""
    directory = Path(model.model).expanduser()
    if directory.is_dir() and (directory / TOKENIZER_FILES[0]).is_file():
        return str(directory.resolve())  # without weights, too: nothing is computed here
    return str(locate(model.model, model.dtype) or fetch_with_progress(model.model, model.dtype))
