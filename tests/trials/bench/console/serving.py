"""A router process with its console, in front of workers that compute nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from cluster.supervisor.fleet_service import FleetService
from cluster.values.spec import LAUNCHED_GRACE_S
from router.addresses import Addresses
from router.auth.api_keys import operator_key
from twostroke.base.errors import PeerLost
from twostroke.base.json_values import from_values
from twostroke.config import EndpointsConfig, ListenConfig, RouterConfig, RoutingConfig, TracingConfig
from twostroke.rpc.proof import TOKEN_KEY
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, fleet_pb2, fleet_pb2_grpc

TOKEN = "token-of-the-benchmark"
PATIENCE_S = 120.0
"""Bounds each wait for a process."""
MODEL = "idle"


@dataclass(frozen=True, slots=True)
class Served:
    address: str
    """HOST:PORT for HTTP."""
    key: str
    """The operator's key."""
    router_pid: int


@asynccontextmanager
async def serving(workers: int) -> AsyncIterator[Served]:
    """Yields a router that has heard of all workers. Raises PeerLost where a process ends early."""
    fleet, server = FleetService(), RpcServer("127.0.0.1", 0, token=TOKEN)
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server.server)
    await server.start()
    processes: list[asyncio.subprocess.Process] = []
    try:
        listed = await _first_line(processes, TOKEN + "\n", "tests.trials.bench.console.workers", str(workers))
        fleet.publish(_view(listed))
        config = RouterConfig(
            listen=ListenConfig(http_port=0, grpc_port=0),
            endpoints=EndpointsConfig(admin_port=0),
            fleet_address=server.address,
            cluster_token=TOKEN,
            served_model_name=MODEL,
            routing=RoutingConfig(seed=7),
            tracing=TracingConfig(),
            drain_grace_s=LAUNCHED_GRACE_S,
        )
        said = await _first_line(processes, config.to_json() + "\n", "router", ends_input=True)
        addresses = from_values(Addresses, said)
        await _until_all_serve(addresses.admin, workers)
        yield Served(addresses.http, operator_key(TOKEN), processes[-1].pid)
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        await server.stop(0)


async def _first_line(
    processes: list[asyncio.subprocess.Process], given: str, *module: str, ends_input: bool = False
) -> object:
    """Starts a module, and returns what its first line says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    processes.append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(given.encode())
    if ends_input:
        process.stdin.close()
    line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
    if not line:
        raise PeerLost(f"{module[0]} ended before it was ready")
    said: object = json.loads(line)
    return said


def _view(listed: object) -> fleet_pb2.FleetView:
    assert isinstance(listed, Sequence)
    workers = [
        fleet_pb2.WorkerEntry(
            worker_id=name, role=role, address=address, epoch=epoch, state=control_pb2.WORKER_STATE_SERVING
        )
        for name, role, address, epoch in listed
    ]
    return fleet_pb2.FleetView(version=1, workers=workers)


async def _until_all_serve(admin: str, workers: int) -> None:
    async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(admin) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        while True:
            loads = await stub.GetLoad(control_pb2.GetLoadRequest(), metadata=((TOKEN_KEY, TOKEN),))
            if sum(each.load.state == control_pb2.WORKER_STATE_SERVING for each in loads.workers) == workers:
                return
            await asyncio.sleep(0.1)
