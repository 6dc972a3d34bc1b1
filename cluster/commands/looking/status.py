"""`twostroke status`: which workers serve, with their epoch, load and pages, as the routers' Control service says."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from rich import box
from rich.console import Console
from rich.table import Table

from cluster.clients import admin_access, control_socket, state_file
from cluster.clients.admin_access import ANSWER_S, AdminAccess, describe, router_info, status_of
from cluster.scaling.status import ScalingStatus
from twostroke.base.credentials import TOKEN_VARIABLE
from twostroke.base.errors import PeerLost, Unauthenticated
from twostroke.rpc.convert import form_of
from twostroke.rpc.events import tier_from_message
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

PIPE_COLUMNS = 160
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RouterLine:
    address: str
    """Address of its admin port."""
    router_id: str
    """Empty, as the other fields, where it does not answer."""
    state: str
    http: str
    grpc: str
    metrics: str


@dataclass(frozen=True, slots=True)
class TierLine:
    tier: str
    blocks: int
    """Blocks that can be loaded from it."""
    used_bytes: int
    capacity_bytes: int
    page_s: float
    """Measured seconds to load one page."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One part of a worker's memory, as predicted and as measured."""

    part: str
    billed_bytes: int
    measured_bytes: int
    """0 where the system does not measure this part separately."""


@dataclass(frozen=True, slots=True)
class WorkerLine:
    worker_id: str
    role: str
    """Empty, as epoch and metrics_address, until the worker has introduced itself to the router."""
    state: str
    epoch: str
    metrics_address: str
    kernels: str
    """The build of the native kernels that computes on a CPU, or torch; empty, as the reason, where a device computes,
    or nothing does."""
    kernels_reason: str
    """Why this one."""
    threads: int
    """Compute threads in all ranks; 0 where there are no kernels."""
    ranks: int
    """Processes that compute together; 0 where there are no kernels."""
    running: int
    waiting: int
    queued_tokens: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_pinned: int
    pages_arriving: int
    pages_active: int
    pages_quarantined: int
    tiers: tuple[TierLine, ...]
    """The tiers below its pages that are in use."""
    memory: tuple[MemoryLine, ...]
    queried_tokens: int
    """Tokens of prompts that were looked up in the prefix cache since the epoch began."""
    hit_tokens: int
    """Tokens of those that were found there."""
    further_pages: dict[str, int]
    """Pages of the further group by state; empty where there is one group."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    admin_access.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    access = admin_access.access_from(args)
    routers = [_router(address, access) for address in access.addresses]
    # Every router knows every worker: the first that answers is asked.
    address = next((router.address for router in routers if router.state), routers[0].address)
    with access.channel(address) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        try:
            model = control.GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=ANSWER_S)
            loads = control.GetLoad(control_pb2.GetLoadRequest(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            raise PeerLost(f"{address}: {describe(error)}") from error
    workers = [_line(entry) for entry in loads.workers]
    scaling = _scaling(args)
    if args.json:
        lines = {"routers": [asdict(line) for line in routers], "workers": [asdict(line) for line in workers]}
        print(json.dumps({"address": address, "model": model.model, **lines, "scaling": scaling}))
    else:
        _print_tables(model, routers, workers)
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


def _router(address: str, access: AdminAccess) -> RouterLine:
    try:
        info = router_info(address, access)
    except grpc.RpcError as error:
        if status_of(error) is grpc.StatusCode.UNAUTHENTICATED:
            raise Unauthenticated(f"{address}: {describe(error)}; name its file in {TOKEN_VARIABLE}") from error
        return RouterLine(address, router_id="", state="", http="", grpc="", metrics="")
    addresses = (info.http_address, info.grpc_address, info.metrics_address)
    return RouterLine(address, info.server_id, _state_text(info.state), *addresses)


def _state_text(state: control_pb2.WorkerState) -> str:
    return control_pb2.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()


def _line(entry: control_pb2.WorkerLoad) -> WorkerLine:
    load = entry.load
    # A worker that has not reported yet has no state of its own.
    state = load.state or control_pb2.WORKER_STATE_STARTING
    return WorkerLine(
        worker_id=entry.worker_id,
        role=entry.server.role,
        state=_state_text(state),
        epoch=entry.server.epoch,
        metrics_address=entry.server.metrics_address,
        kernels=entry.server.kernels.variant,
        kernels_reason=entry.server.kernels.reason,
        threads=entry.server.kernels.threads,
        ranks=entry.server.kernels.ranks,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        pages_total=load.pages_total,
        pages_free=load.pages_free,
        pages_cached=load.pages_cached,
        pages_pinned=load.pages_pinned,
        pages_arriving=load.pages_arriving,
        pages_active=load.pages_active,
        pages_quarantined=load.pages_quarantined,
        tiers=tuple(
            TierLine(
                tier_from_message(rate.tier).name.lower(),
                rate.blocks,
                rate.used_bytes,
                rate.capacity_bytes,
                rate.page_s,
            )
            for rate in load.tiers
        ),
        memory=tuple(MemoryLine(use.part, use.billed_bytes, use.measured_bytes) for use in entry.server.memory),
        further_pages=_further_pages(load),
        queried_tokens=load.queried_tokens,
        hit_tokens=load.hit_tokens,
    )


def _print_tables(model: control_pb2.ModelInfo, routers: list[RouterLine], workers: list[WorkerLine]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    fitting = model.pool_pages * model.block_size
    room = f" ({fitting} fit into a page pool)" if fitting < model.max_model_len else ""
    console.print(
        f"{model.model}: {model.dtype}, {model.max_model_len} tokens{room}, blocks of {model.block_size}, "
        f"KV in {form_of(model)}",
        markup=False,
    )
    table_of_routers = Table(box=box.SIMPLE_HEAD)
    for heading in ("router", "state", "http", "grpc", "admin"):
        table_of_routers.add_column(heading, no_wrap=True)
    for router in routers:
        state = router.state or "does not answer"
        table_of_routers.add_row(router.router_id or "-", state, router.http or "-", router.grpc or "-", router.address)
    console.print(table_of_routers)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("worker", "role", "state", "epoch"):
        table.add_column(heading, no_wrap=True)
    for heading in ("runs", "waits", "tokens"):
        table.add_column(heading, justify="right")
    table.add_column("pages", overflow="fold")
    table.add_column("hits", justify="right")
    table.add_column("memory", overflow="fold")
    table.add_column("kernels", overflow="fold")
    for line in workers:
        counts = (line.running, line.waiting, line.queued_tokens)
        ends = (_pages(line), _hits(line), _memory(line), _kernels(line))
        table.add_row(line.worker_id, line.role or "-", line.state, line.epoch or "-", *map(str, counts), *ends)
    console.print(table)


def _further_pages(load: control_pb2.Load) -> dict[str, int]:
    if not load.HasField("further"):
        return {}
    said = load.further
    return {
        "free": said.free,
        "cached": said.cached,
        "pinned": said.pinned,
        "arriving": said.arriving,
        "active": said.active,
        "quarantined": said.quarantined,
    }


def _pages(line: WorkerLine) -> str:
    """Describes pages as "91: 80 free, 11 cached; windows 40: 9 free, 31 cached; disk 512 (37% full)".

    States without pages are left out.
    """
    states = {
        "free": line.pages_free,
        "cached": line.pages_cached,
        "pinned": line.pages_pinned,
        "arriving": line.pages_arriving,
        "active": line.pages_active,
        "quarantined": line.pages_quarantined,
    }
    below = [
        f"; {each.tier} {each.blocks} ({each.used_bytes / max(1, each.capacity_bytes):.0%} full)" for each in line.tiers
    ]
    if line.further_pages:
        below = [f"; windows {sum(line.further_pages.values())}: {_counts(line.further_pages)}", *below]
    return f"{line.pages_total}: {_counts(states)}{''.join(below)}"


def _counts(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items() if count)


def _hits(line: WorkerLine) -> str:
    """Returns the share of prompt tokens that were found in the prefix cache."""
    return f"{line.hit_tokens / line.queried_tokens:.1%}" if line.queried_tokens else "-"


def _memory(line: WorkerLine) -> str:
    """Describes memory as "pages 1024.1 MiB (billed 1024.1)"; a part that was not measured shows only its bill."""
    parts = []
    for use in line.memory:
        billed = f"{use.billed_bytes / MIB:.1f}"
        said = f"{use.measured_bytes / MIB:.1f} MiB (billed {billed})" if use.measured_bytes else f"billed {billed} MiB"
        parts.append(f"{use.part} {said}")
    return ", ".join(parts) or "-"


def _kernels(line: WorkerLine) -> str:
    """Describes what computes as "avx512_bf16 on 2 threads of 2 ranks (measured)"; one rank is not named."""
    if not line.kernels:
        return "-"
    ranks = f" of {line.ranks} ranks" if line.ranks > 1 else ""
    return f"{line.kernels} on {line.threads} thread{'s' * (line.threads != 1)}{ranks} ({line.kernels_reason})"
