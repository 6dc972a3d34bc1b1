"""`twostroke status`: which workers serve, with their epoch, load and pages, as the routers' Control service says."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from cluster.clients import admin_access, control_socket, state_file
from cluster.clients.admin_access import ANSWER_S, AdminAccess, describe, router_info, status_of
from cluster.terminal.shown import print_table, table, values_of, word_of
from cluster.values.worker_counts import ScalingStatus
from twostroke.base.credentials import TOKEN_VARIABLE
from twostroke.base.errors import PeerLost, Unauthenticated
from twostroke.rpc.convert import form_of
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

MIB = 1 << 20
Values = Mapping[str, Any]
"""What a router or a worker reports, by the names of the message's fields."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    admin_access.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    access = admin_access.access_from(args)
    routers = [_router(address, access) for address in access.addresses]
    # Every router knows every worker: the first that answers is asked.
    address = next((router["address"] for router in routers if router["state"]), routers[0]["address"])
    with access.channel(address) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        try:
            model = control.GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=ANSWER_S)
            loads = control.GetLoad(control_pb2.GetLoadRequest(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            raise PeerLost(f"{address}: {describe(error)}") from error
    workers = [worker_values(entry) for entry in loads.workers]
    scaling = _scaling(args)
    if args.json:
        lines = {"routers": routers, "workers": workers, "scaling": scaling}
        print(json.dumps({"address": address, "model": model.model, **lines}))
    else:
        print_tables(model, routers, workers)
        if scaling is not None:
            print("\n".join(ScalingStatus(**scaling).lines()))
    return 0


def _scaling(args: argparse.Namespace) -> Any:
    """Returns the scaling status of a local fleet; None while its supervisor is away."""
    if args.admin is not None:
        return None
    try:
        return control_socket.send(Path(state_file.the_one_running(args.pid).log_dir), "scaling")
    except PeerLost:
        return None


def _router(address: str, access: AdminAccess) -> Values:
    """Returns the addresses of a router, all but the given one empty where it does not answer."""
    try:
        info = router_info(address, access)
    except grpc.RpcError as error:
        if status_of(error) is grpc.StatusCode.UNAUTHENTICATED:
            raise Unauthenticated(f"{address}: {describe(error)}; name its file in {TOKEN_VARIABLE}") from error
        info = control_pb2.ServerInfo()
    addresses = {"http": info.http_address, "grpc": info.grpc_address, "metrics": info.metrics_address}
    state = _state(info.state) if info.state else ""
    return {"address": address, "router_id": info.server_id, "state": state, **addresses}


def _state(state: control_pb2.WorkerState) -> str:
    return word_of(control_pb2.WorkerState.DESCRIPTOR, state)


def worker_values(entry: control_pb2.WorkerLoad) -> Values:
    """Returns all that a worker reports of itself and of its load."""
    # A worker that has not reported yet has no state of its own.
    state = _state(entry.load.state or control_pb2.WORKER_STATE_STARTING)
    return {"worker_id": entry.worker_id, **values_of(entry.server), **values_of(entry.load), "state": state}


def print_tables(model: control_pb2.ModelInfo, routers: Sequence[Values], workers: Sequence[Values]) -> None:
    fitting = model.pool_pages * model.block_size
    room = f" ({fitting} fit into a page pool)" if fitting < model.max_model_len else ""
    print(
        f"{model.model}: {model.dtype}, {model.max_model_len} tokens{room}, blocks of {model.block_size}, "
        f"KV in {form_of(model)}"
    )
    of_routers = table("router", "state", "http", "grpc", "admin", "metrics")
    for router in routers:
        http, grpc_port, metrics = (router[name] or "-" for name in ("http", "grpc", "metrics"))
        state = router["state"] or "does not answer"
        of_routers.add_row(router["router_id"] or "-", state, http, grpc_port, router["address"], metrics)
    print_table(of_routers)
    counts, folded = ("runs", "waits", "tokens"), ("pages", "memory", "kernels")
    of_workers = table(
        *("worker", "role", "state", "epoch", *counts, "pages", "hits", "memory", "kernels"),
        numbers=(*counts, "hits"),
        folded=folded,
    )
    for worker in workers:
        names = (worker["worker_id"], worker["role"] or "-", worker["state"], worker["epoch"] or "-")
        numbers = (str(worker[name]) for name in ("running", "waiting", "queued_tokens"))
        of_workers.add_row(*names, *numbers, _pages(worker), _hits(worker), _memory(worker), _kernels(worker))
    print_table(of_workers)


def _pages(worker: Values) -> str:
    """Describes pages as "91: 80 free, 11 cached; further 40: 9 free, 31 cached; disk 512 (37% full)".

    Every message of the load that has a total is described as the pages are. States without pages are left out.
    """
    states = {name.removeprefix("pages_"): count for name, count in worker.items() if name.startswith("pages_")}
    apart = {name: value for name, value in worker.items() if isinstance(value, dict) and "total" in value}
    below = (
        f"{each['tier']} {each['blocks']} ({each['used_bytes'] / max(1, each['capacity_bytes']):.0%} full)"
        for each in worker["tiers"]
    )
    return "; ".join([_counts(states), *(f"{name} {_counts(each)}" for name, each in apart.items()), *below])


def _counts(states: Values) -> str:
    listed = ", ".join(f"{count} {state}" for state, count in states.items() if count and state != "total")
    return f"{states['total']}: {listed}"


def _hits(worker: Values) -> str:
    """Returns the share of prompt tokens that were found in the prefix cache."""
    return f"{worker['hit_tokens'] / worker['queried_tokens']:.1%}" if worker["queried_tokens"] else "-"


def _memory(worker: Values) -> str:
    """Describes memory as "pages 1024.1 MiB (billed 1024.1)"; a part that was not measured shows only its bill."""
    parts = []
    for use in worker["memory"]:
        billed, measured = f"{use['billed_bytes'] / MIB:.1f}", use["measured_bytes"] / MIB
        parts.append(f"{use['part']} {f'{measured:.1f} MiB (billed {billed})' if measured else f'billed {billed} MiB'}")
    return ", ".join(parts) or "-"


def _kernels(worker: Values) -> str:
    """Describes what computes as "avx512_bf16 on 2 threads of 2 ranks (measured)"; one rank is not named."""
    kernels = worker["kernels"]
    if not kernels or not kernels["variant"]:
        return "-"
    threads = kernels["threads"]
    ranks = f" of {kernels['ranks']} ranks" if kernels["ranks"] > 1 else ""
    return f"{kernels['variant']} on {threads} thread{'s' * (threads != 1)}{ranks} ({kernels['reason']})"
