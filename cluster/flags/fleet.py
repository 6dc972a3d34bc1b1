"""How many processes of each kind, where they listen, what they compute on, and the Ray cluster under them."""

from __future__ import annotations

import argparse

from cluster.flags.defaults import DEFAULTS, with_default


def add_counts(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--prefill",
        type=int,
        default=DEFAULTS.prefill,
        metavar="N",
        help=with_default("prefill workers; 0: decode workers do both"),
    )
    group.add_argument("--decode", type=int, default=DEFAULTS.decode, metavar="N", help=with_default("decode workers"))


def add_routers(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--routers",
        type=int,
        default=DEFAULTS.routers,
        metavar="N",
        help=with_default("routers, on ports counted up from --http-port and --grpc-port; 0: they run elsewhere"),
    )
    add_doors(group)


def add_doors(group: argparse._ActionsContainer) -> None:
    group.add_argument("--host", default=DEFAULTS.host, help=with_default("interface that clients connect to"))
    group.add_argument(
        "--http-port",
        type=int,
        default=DEFAULTS.http_port,
        metavar="PORT",
        help=with_default("OpenAI HTTP API; 0: any free one"),
    )
    group.add_argument(
        "--grpc-port",
        type=int,
        default=DEFAULTS.grpc_port,
        metavar="PORT",
        help=with_default("twostroke.v1 gRPC API; 0: any free one"),
    )


def add_workers(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--threads",
        type=int,
        default=DEFAULTS.threads,
        metavar="N",
        help=with_default("compute threads of each worker"),
    )
    group.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.pin,
        help=with_default("keep each compute thread on its core"),
    )
    group.add_argument(
        "--borrow",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.borrow,
        help=with_default("compute on cores of other workers too while those are idle"),
    )
    group.add_argument(
        "--transports",
        default=None,
        metavar="NAMES",
        help="how pages travel, best first, of cuda_ipc, shm, nixl, tcp (default: shm,tcp, or cuda_ipc,tcp on GPUs)",
    )
    group.add_argument(
        "--orphan-grace",
        type=float,
        default=DEFAULTS.orphan_grace_s,
        metavar="SECONDS",
        help=with_default("how long decode workers keep answers whose router is gone"),
    )


def add_ray(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--address",
        default=DEFAULTS.address,
        metavar="HOST:PORT",
        help="join this Ray cluster, with the token of RAY_AUTH_TOKEN; auto: the one that this node is in (default: a "
        "local Ray that ends with it)",
    )
    group.add_argument(
        "--ray-wait",
        type=float,
        default=DEFAULTS.ray_wait_s,
        metavar="SECONDS",
        help=with_default("how long to wait for that Ray cluster, and for nodes that workers fit on"),
    )
