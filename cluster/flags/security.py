"""Flags for who may come in, and where: API keys, limits of requests, the admin and metrics ports."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.flags import tls
from twostroke.doors_config import DoorsConfig

DEFAULTS = DoorsConfig()


def add(parser: argparse.ArgumentParser) -> None:
    add_doors(parser.add_argument_group("doors"))
    tls.add(parser.add_argument_group("certificates"))


def add_doors(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--admin-port",
        type=int,
        default=DEFAULTS.admin_port,
        metavar="PORT",
        help="gRPC health for probes; Control for who has the cluster's token (default: any free one)",
    )
    group.add_argument(
        "--metrics-port",
        type=int,
        default=DEFAULTS.metrics_port,
        metavar="PORT",
        help="HTTP /metrics and health there instead of on --http-port; 0: any free one (default: on --http-port)",
    )
    group.add_argument(
        "--metrics-host",
        default=DEFAULTS.metrics_host,
        metavar="HOST",
        help="interface of --metrics-port (default: --host)",
    )
    group.add_argument(
        "--api-keys",
        default=DEFAULTS.api_keys,
        metavar="FILE",
        help="clients need a key of this file (`twostroke keys add`), within its limits (default: anybody may come in)",
    )
    group.add_argument(
        "--max-request-bytes",
        type=int,
        default=DEFAULTS.max_request_bytes,
        metavar="BYTES",
        help="of one HTTP body or gRPC message (default: %(default)s)",
    )
    group.add_argument(
        "--max-connections",
        type=int,
        default=DEFAULTS.max_connections,
        metavar="N",
        help="over HTTP, and as many over gRPC; one more, and the one that has waited longest without a request is "
        "closed (default: %(default)s)",
    )
    group.add_argument(
        "--max-connection-age",
        type=float,
        default=DEFAULTS.max_connection_age_s,
        metavar="SECONDS",
        help="gRPC clients connect again after so long, wherever their name leads then; streams go on "
        "(default: %(default)s)",
    )
    add_web(group)


def add_web(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages of this origin (https://app.example.com, or *) may call from a browser, without credentials; "
        "any number of times (default: none)",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which clients or a reverse proxy may ask (Host header), or *; any number of times (default: on "
        "loopback without --api-keys the names of loopback, elsewhere any)",
    )


def doors_from(args: argparse.Namespace) -> DoorsConfig:
    """Raises ConfigError that names the flag."""
    return DoorsConfig(
        admin_port=args.admin_port,
        metrics_port=args.metrics_port,
        metrics_host=args.metrics_host,
        api_keys=None if args.api_keys is None else str(Path(args.api_keys).absolute()),
        max_request_bytes=args.max_request_bytes,
        max_connections=args.max_connections,
        max_connection_age_s=args.max_connection_age,
        cors_origins=tuple(args.cors_origin),
        allowed_hosts=tuple(args.allowed_host),
    )
