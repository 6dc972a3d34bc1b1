"""The supervisor without Ray: workers are coroutines of this process that tests can kill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from cluster.actors import Place, Serving
from cluster.ground import WorkerDied
from cluster.plan import Stage
from cluster.spec import FleetSpec, fleet_spec
from cluster.supervisor import Snapshot, Supervisor, Worker
from twostroke.config import ClusterConfig, WorkerConfig
from twostroke.errors import ConfigError, InternalError, ServeError
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.v1 import control_pb2, fleet_pb2, fleet_pb2_grpc

TOKEN = "the cluster's token"
DEAD, STARTING, SERVING = (
    control_pb2.WORKER_STATE_DEAD,
    control_pb2.WORKER_STATE_STARTING,
    control_pb2.WORKER_STATE_SERVING,
)


class FakeWorker:
    """Its lives end when a test says so; `dies_of` lets each life end by itself before it serves."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.incarnations: list[int] = []
        self.dies_of: ServeError | None = None
        self.recycled = 0
        self.is_removed = False
        self.is_shut_down = False
        self._end: asyncio.Future[None] | None = None

    async def place(self) -> Place:
        return Place(pid=1, node_id="node", log_path="")

    async def run(self, incarnation: int) -> None:
        self.incarnations.append(incarnation)
        if self.dies_of is not None:
            raise self.dies_of
        self._end = asyncio.get_running_loop().create_future()
        await self._end

    async def ready(self) -> Serving:
        if self.dies_of is not None:
            raise self.dies_of
        epoch = f"{self.incarnations[-1]}.00"
        return Serving(f"{self.worker_id}:1", epoch, "fingerprint", "metrics:1")

    async def shutdown(self) -> None:
        self.is_shut_down = True
        if self._end is not None:
            self._end.set_result(None)

    def recycle(self) -> None:
        self.recycled += 1

    def remove(self) -> None:
        self.is_removed = True

    def die(self, error: ServeError) -> None:
        assert self._end is not None
        self._end.set_exception(error)


class FakeGround:
    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.created: list[str] = []
        self.dies_of: ServeError | None = None
        self._incarnations: dict[str, int] = {}

    def find(self, config: WorkerConfig) -> FakeWorker | None:
        return self.workers.get(config.worker_id)

    def create(self, config: WorkerConfig) -> FakeWorker:
        worker = self.workers[config.worker_id] = FakeWorker(config.worker_id)
        worker.dies_of = self.dies_of
        self.created.append(config.worker_id)
        return worker

    def next_incarnation(self, worker_id: str) -> int:
        self._incarnations[worker_id] = self._incarnations.get(worker_id, 0) + 1
        return self._incarnations[worker_id]

    def forget(self) -> None:
        self._incarnations.clear()


def spec() -> FleetSpec:
    return fleet_spec(ClusterConfig(prefill=1, decode=1), token=TOKEN, port=0)


@asynccontextmanager
async def running(ground: FakeGround) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(spec(), ground)
    life = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        life.cancel()
        await supervisor.stop()
        await asyncio.gather(life, return_exceptions=True)


async def until(supervisor: Supervisor, is_so: str, worker_id: str = "decode-0", epoch: str | None = None) -> Worker:
    """The worker, once it is in the named stage (of the life with that epoch)."""
    version = -1
    async with asyncio.timeout(10):
        while True:
            snapshot: Snapshot = await supervisor.snapshot(version)
            version = snapshot.version
            worker = next(worker for worker in snapshot.workers if worker.config.worker_id == worker_id)
            epoch_now = worker.serving.epoch if worker.serving else None
            if worker.observed.stage is Stage(is_so) and epoch in (None, epoch_now):
                return worker


@asynccontextmanager
async def watching(supervisor: Supervisor, token: str = TOKEN) -> AsyncIterator[AsyncIterator[fleet_pb2.FleetView]]:
    peer = PeerChannel(await supervisor.address(), token)
    call = fleet_pb2_grpc.FleetStub(peer.channel).Watch(
        fleet_pb2.WatchRequest(watcher="test"), metadata=peer.metadata, timeout=10
    )
    try:
        yield aiter(call)
    finally:
        call.cancel()
        await peer.close()


def state_of(view: fleet_pb2.FleetView, worker_id: str = "decode-0") -> tuple[int, str]:
    member = next(member for member in view.members if member.worker_id == worker_id)
    return member.state, member.epoch


async def test_all_workers_of_the_spec_come_to_serve_with_the_address_they_name() -> None:
    async with running(FakeGround()) as supervisor:
        for worker_id in ("prefill-0", "decode-0"):
            worker = await until(supervisor, "serving", worker_id)
            assert worker.serving == Serving(f"{worker_id}:1", "1.00", "fingerprint", "metrics:1")
            assert worker.to_member().node == "node"


async def test_a_watcher_sees_a_death_a_start_and_the_new_epoch_each_by_itself() -> None:
    ground = FakeGround()
    async with running(ground) as supervisor:
        await until(supervisor, "serving")
        async with watching(supervisor) as views:
            assert state_of(await anext(views)) == (SERVING, "1.00")
            ground.workers["decode-0"].die(WorkerDied("killed"))
            seen = [state_of(await anext(views))]
            while seen[-1][0] != SERVING:
                state = state_of(await anext(views))
                if state != seen[-1]:
                    seen.append(state)
    assert seen == [(DEAD, "1.00"), (STARTING, ""), (SERVING, "2.00")]
    assert ground.workers["decode-0"].recycled == 0


async def test_a_silent_view_is_repeated() -> None:
    async with running(FakeGround()) as supervisor:
        for worker_id in ("prefill-0", "decode-0"):
            await until(supervisor, "serving", worker_id)
        async with watching(supervisor) as views:
            assert (await anext(views)) == (await anext(views))


async def test_a_watcher_without_the_cluster_token_is_refused() -> None:
    async with running(FakeGround()) as supervisor, watching(supervisor, "wrong") as views:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(views)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_worker_that_reports_an_error_gets_a_fresh_process() -> None:
    ground = FakeGround()
    async with running(ground) as supervisor:
        await until(supervisor, "serving")
        ground.workers["decode-0"].die(InternalError("engine thread ended"))
        worker = await until(supervisor, "serving", epoch="2.00")
    assert isinstance(worker.last_error, InternalError)
    assert ground.workers["decode-0"].recycled == 1


async def test_a_worker_that_cannot_start_as_configured_fails_for_good_with_its_message() -> None:
    ground = FakeGround()
    ground.dies_of = ConfigError("--kv-cache-memory is larger than the machine", field="kv_cache_memory")
    async with running(ground) as supervisor:
        worker = await until(supervisor, "failed")
        assert str(worker.last_error) == "--kv-cache-memory is larger than the machine"
        assert ground.workers["decode-0"].incarnations == [1]


async def test_a_worker_that_keeps_dying_is_started_again_and_again_with_growing_incarnations() -> None:
    ground = FakeGround()
    ground.dies_of = WorkerDied("out of memory")
    async with running(ground) as supervisor:
        snapshot = await supervisor.snapshot()
        async with asyncio.timeout(10):
            while min(worker.observed.crashes for worker in snapshot.workers) < 3:
                snapshot = await supervisor.snapshot(snapshot.version)
        assert not any(worker.observed.has_served for worker in snapshot.workers)
    assert ground.workers["decode-0"].incarnations[:3] == [1, 2, 3]


async def test_a_restarted_supervisor_adopts_the_workers_it_finds() -> None:
    ground = FakeGround()
    first = Supervisor(spec(), ground)
    life = asyncio.create_task(first.run())
    await until(first, "serving")
    await until(first, "serving", "prefill-0")
    life.cancel()
    assert first._life is not None
    first._life.cancel()
    await asyncio.gather(life, first._life, return_exceptions=True)

    async with running(ground) as second:
        await until(second, "serving")
        await until(second, "serving", "prefill-0")
    assert sorted(ground.created) == ["decode-0", "prefill-0"]


async def test_stopping_shuts_every_worker_down_and_removes_it() -> None:
    ground = FakeGround()
    async with running(ground) as supervisor:
        await until(supervisor, "serving")
        await until(supervisor, "serving", "prefill-0")
    assert all(worker.is_shut_down and worker.is_removed for worker in ground.workers.values())
    assert not any(worker.incarnations[1:] for worker in ground.workers.values())


async def test_a_fleet_port_in_use_ends_the_supervisor_with_a_clear_error() -> None:
    async with running(FakeGround()) as supervisor:
        port = int((await supervisor.address()).rpartition(":")[2])
        second = Supervisor(FleetSpec(workers=(), port=port), FakeGround())
        with pytest.raises(ConfigError, match=str(port)):
            await second.run()
