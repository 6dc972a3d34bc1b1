"""The supervisor on a real Ray, with workers that serve nothing: deaths, incarnations, adoption, removal.

`test_serve.py` shows in the gate that a served fleet survives the same deaths.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray import cloudpickle

from cluster.ray import session as ray_session
from cluster.ray.backend import RayBackend
from cluster.supervisor.actors import MountedWorker, PlainWorker, Serving
from cluster.supervisor.reconcile.plan import WorkerStage
from cluster.supervisor.supervisor import Supervisor
from cluster.supervisor.view import FleetSnapshot, SupervisedWorker
from cluster.values.placement import nodes_from_ray
from cluster.values.spec import NAMESPACE, SUPERVISOR, FleetSpec, fleet_spec
from tests.process_table import title_of
from twostroke.base.errors import ConfigError
from twostroke.config import ClusterConfig, Role, WorkerConfig
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.v1 import control_pb2, fleet_pb2, fleet_pb2_grpc

pytestmark = pytest.mark.slow

TOKEN = "the cluster's token"
PATIENCE_S = 60.0


class StandIn:
    """A plain worker without model or servers."""

    engine_state = None

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._started = asyncio.Event()
        self._ended = asyncio.Event()
        self._incarnation = 0

    async def run(self, incarnation: int) -> None:
        if self._config.model.max_model_len == 1:
            raise ConfigError("--max-model-len 1 leaves no room for an answer", field="max_model_len")
        self._incarnation = incarnation
        self._started.set()
        await self._ended.wait()

    async def ready(self) -> Serving:
        await self._started.wait()
        return Serving(
            f"{self._config.host}:1", f"{self._incarnation}.{os.getpid():016x}", "fingerprint", "metrics:1", Role.DECODE
        )

    async def drain(self, deadline_s: float) -> int:
        return 0

    async def shutdown(self) -> None:
        self._ended.set()


class PrefillActor(MountedWorker):
    def _load(self, config: WorkerConfig, engine_state: object) -> PlainWorker:
        return StandIn(config)


class DecodeActor(MountedWorker):
    def _load(self, config: WorkerConfig, engine_state: object) -> PlainWorker:
        return StandIn(config)


@pytest.fixture(scope="module")
def on_ray() -> Iterator[None]:
    """A local Ray. Worker processes cannot import this module, so its classes travel by value."""
    folder = Path(tempfile.mkdtemp(prefix="ts-"))
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    with pytest.MonkeyPatch.context() as environment:
        # Said explicitly, because Ray was imported, and has read its environment, long before.
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray_session.start_local(folder)
        yield
        ray_session.leave()
    cloudpickle.unregister_pickle_by_value(module)
    shutil.rmtree(folder)


def spec(**changes: Any) -> FleetSpec:
    return fleet_spec(ClusterConfig(prefill=1, decode=1, **changes), token=TOKEN, port=0)


@asynccontextmanager
async def supervising(fleet: FleetSpec) -> AsyncIterator[Any]:
    mounts: dict[Role, type[MountedWorker]] = {Role.PREFILL: PrefillActor, Role.DECODE: DecodeActor}
    backend = RayBackend(worker_count=2, mounts=mounts, clock=lambda: 1.0)
    supervisor = (
        ray.remote(max_restarts=-1)(Supervisor)
        .options(name=SUPERVISOR, namespace=NAMESPACE, lifetime="detached", num_cpus=0)
        .remote(fleet, backend)
    )
    running = supervisor.run.remote()
    try:
        yield supervisor
    finally:
        await supervisor.stop.remote()
        ray.kill(supervisor)
        del running


async def until(
    supervisor: Any, stage: WorkerStage, worker_id: str = "decode-0", *, incarnation: int | None = None
) -> SupervisedWorker:
    version = -1
    async with asyncio.timeout(PATIENCE_S):
        while True:
            snapshot: FleetSnapshot = await supervisor.snapshot.options(max_task_retries=-1).remote(version)
            version = snapshot.version
            worker = next(worker for worker in snapshot.workers if worker.config.worker_id == worker_id)
            now = int(worker.serving.epoch.partition(".")[0]) if worker.serving else None
            if worker.observed.stage is stage and incarnation in (None, now):
                return worker


def pid_of(worker: SupervisedWorker) -> int:
    assert worker.place is not None
    return worker.place.pid


async def test_a_killed_worker_is_dead_in_the_view_at_once_and_comes_back_as_its_next_incarnation(on_ray: None) -> None:
    async with supervising(spec()) as supervisor:
        before = await until(supervisor, WorkerStage.SERVING)
        peer = PeerChannel(await supervisor.address.remote(), TOKEN)
        watch = fleet_pb2_grpc.FleetStub(peer.channel).Watch(
            fleet_pb2.WatchRequest(watcher="test"), metadata=peer.metadata, timeout=PATIENCE_S
        )
        os.kill(pid_of(before), signal.SIGKILL)
        states: list[int] = []
        async for view in watch:
            state = next(worker.state for worker in view.workers if worker.worker_id == "decode-0")
            if state not in states[-1:]:
                states.append(state)
            if len(states) == 4:
                break
        await peer.close()
        after = await until(supervisor, WorkerStage.SERVING, incarnation=2)
        other = await until(supervisor, WorkerStage.SERVING, "prefill-0", incarnation=1)

    serving, dead, starting = (
        control_pb2.WORKER_STATE_SERVING,
        control_pb2.WORKER_STATE_DEAD,
        control_pb2.WORKER_STATE_STARTING,
    )
    assert states == [serving, dead, starting, serving]
    assert pid_of(after) != pid_of(before)
    assert other.observed.crashes == 0


async def test_a_killed_supervisor_finds_its_workers_again_and_their_incarnations_go_on(on_ray: None) -> None:
    async with supervising(spec()) as supervisor:
        before = await until(supervisor, WorkerStage.SERVING, incarnation=1)
        os.kill(await pid_of_actor(supervisor), signal.SIGKILL)
        await supervisor.snapshot.options(max_task_retries=-1).remote()
        running = supervisor.run.remote()
        adopted = await until(supervisor, WorkerStage.SERVING)
        assert adopted.serving == before.serving
        assert pid_of(adopted) == pid_of(before)

        os.kill(pid_of(adopted), signal.SIGKILL)
        reborn = await until(supervisor, WorkerStage.SERVING, incarnation=3)
        assert pid_of(reborn) != pid_of(before)
        del running


async def pid_of_actor(actor: Any) -> int:
    process = await actor.__ray_call__.remote(lambda self: os.getpid())
    return int(process)


async def test_processes_are_named_after_their_role_and_none_of_a_stopped_fleet_stays_in_ray(on_ray: None) -> None:
    async with supervising(spec()) as supervisor:
        processes = {
            role: psutil.Process(pid_of(await until(supervisor, WorkerStage.SERVING, f"{role}-0", incarnation=1)))
            for role in ("prefill", "decode")
        }
        assert title_of(processes["prefill"]).startswith("ray::PrefillActor")
        assert title_of(processes["decode"]).startswith("ray::DecodeActor")
    async with asyncio.timeout(PATIENCE_S):
        while ray.util.list_named_actors() or any(map(title_of, processes.values())):  # Ray has no event for it
            await asyncio.sleep(0.05)


async def test_a_worker_told_to_use_its_nodes_address_does(on_ray: None) -> None:
    async with supervising(spec(address="joined:1")) as supervisor:
        worker = await until(supervisor, WorkerStage.SERVING)
        address = await supervisor.address.remote()
    (node,) = nodes_from_ray(ray.nodes())
    assert worker.serving is not None
    assert worker.serving.address == f"{node.address}:1"
    assert address.startswith(f"{node.address}:")
