"""A supervisor without Ray: its workers are coroutines of this process that tests can kill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.supervisor.actors import ActorLocation, Serving
from cluster.supervisor.backend import AfterDrain, Nodes
from cluster.supervisor.reconcile.plan import WorkerStage
from cluster.supervisor.supervisor import Supervisor
from cluster.supervisor.view import FleetSnapshot, SupervisedWorker
from cluster.values.desired_state import Checkpoint, DesiredState
from cluster.values.spec import FleetSpec, fleet_spec
from cluster.values.worker_counts import WorkerCounts
from twostroke.base.errors import PeerLost, ServeError
from twostroke.config import ClusterConfig, Role, WorkerConfig
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

TOKEN = "the cluster's token"


class Control(control_pb2_grpc.ControlServicer):
    """The control service of a worker that is asked to drain: it says that two requests were left."""

    def __init__(self) -> None:
        self.address = ""
        self.drains: list[control_pb2.DrainRequest] = []
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def Drain(  # noqa: N802
        self, request: control_pb2.DrainRequest, context: object
    ) -> control_pb2.DrainResponse:
        self.drains.append(request)
        await self.may_end.wait()
        return control_pb2.DrainResponse(open_requests=2)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Control]:
        server = RpcServer("127.0.0.1", 0, token=TOKEN)
        control_pb2_grpc.add_ControlServicer_to_server(self, server.server)
        await server.start()
        self.address = server.address
        yield self
        await server.stop(0)


class FakeWorker:
    """Its lives end when a test says so; `dies_of` lets each life end by itself before it serves."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.incarnations: list[int] = []
        self.role = Role.ROUTER
        """The role of its last epoch."""
        self.checkpoint = Checkpoint()
        self.is_idle = True
        self.dies_of: ServeError | None = None
        self.fails_to_load: ServeError | None = None
        """What an epoch with other weights than the first ones ends with before it serves."""
        self.control = Control()
        self.node_id = "node"
        self.room = asyncio.Event()
        """For a new process; the first one has its own."""
        self.recycled = 0
        self.is_removed = False
        self.is_shut_down = False
        self._end: asyncio.Future[None] | None = None

    async def place(self) -> ActorLocation:
        if self.recycled:
            await self.room.wait()
        return ActorLocation(pid=1, node_id=self.node_id, log_path="", is_idle=self.is_idle)

    async def run(self, incarnation: int, role: Role, checkpoint: Checkpoint) -> None:
        self.incarnations.append(incarnation)
        self.role, self.checkpoint, self.is_idle = role, checkpoint, False
        if self._failure is not None:
            raise self._failure
        self._end = asyncio.get_running_loop().create_future()
        await self._end

    @property
    def _failure(self) -> ServeError | None:
        return self.dies_of or (self.fails_to_load if self.checkpoint.number else None)

    async def ready(self, incarnation: int) -> Serving:
        if self._failure is not None:
            raise self._failure
        epoch = f"{self.incarnations[-1]}.00"
        return Serving(
            self.control.address or f"{self.worker_id}:1", epoch, f"fingerprint{self.checkpoint.model}", "metrics:1",
            self.role, checkpoint=self.checkpoint,
        )  # fmt: skip

    async def release(self) -> None:
        self.is_idle = True

    async def shutdown(self) -> None:
        self.is_shut_down = True
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def recycle(self) -> None:
        self.recycled += 1
        self.node_id = "another node"
        self.is_shut_down = False

    def remove(self) -> None:
        self.is_removed = True

    def die(self, error: ServeError) -> None:
        assert self._end is not None
        self._end.set_exception(error)


class FakeBackend:
    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.created: list[str] = []
        self.dies_of: ServeError | None = None
        self.departures: dict[str, AfterDrain | None] = {}
        self.control = Control()
        self.room = asyncio.Event()
        self.room.set()
        self.leaving: dict[str, float] = {}
        """Nodes, and the seconds that they have."""
        self.silent_looks = 0
        """At nodes, that nobody answers from now on."""
        self.written: DesiredState | None = None
        self.asked: WorkerCounts | None = None
        """For room."""
        self.messages: dict[str, dict[str, bytes]] = {"pin": {}, "adapter": {}}
        self.store_error: ServeError | None = None
        self._incarnations: dict[str, int] = {}

    def find(self, config: WorkerConfig) -> FakeWorker | None:
        worker = self.workers.get(config.worker_id)
        return None if worker is None or worker.is_removed else worker

    def create(self, config: WorkerConfig) -> FakeWorker:
        worker = self.workers[config.worker_id] = FakeWorker(config.worker_id)
        worker.dies_of = self.dies_of
        worker.control = self.control
        worker.room = self.room
        self.created.append(config.worker_id)
        return worker

    def next_incarnation(self, worker_id: str) -> int:
        self._incarnations[worker_id] = self._incarnations.get(worker_id, 0) + 1
        return self._incarnations[worker_id]

    def after_drain(self, worker_id: str) -> AfterDrain | None:
        return self.departures.get(worker_id)

    def set_after_drain(self, worker_id: str, after_drain: AfterDrain | None) -> None:
        self.departures[worker_id] = after_drain

    def desired(self) -> DesiredState | None:
        return self.written

    def set_desired(self, desired: DesiredState) -> None:
        self.written = desired

    def stored(self, kind: str) -> dict[str, bytes]:
        return dict(self.messages[kind])

    def store(self, kind: str, key: str, message: bytes | None) -> None:
        if self.store_error is not None:
            raise self.store_error
        if message is None:
            self.messages[kind].pop(key, None)
        else:
            self.messages[kind][key] = message

    @property
    def stored_pins(self) -> dict[str, bytes]:
        return self.messages["pin"]

    def request_nodes(self, placed: WorkerCounts) -> None:
        self.asked = placed

    async def nodes(self) -> Nodes:
        if self.silent_looks:
            self.silent_looks -= 1
            raise PeerLost("nobody answers")
        return Nodes(dict(self.leaving), has_others=True)

    def forget(self) -> None:
        self._incarnations.clear()


def spec() -> FleetSpec:
    return fleet_spec(ClusterConfig(prefill=1, decode=1), token=TOKEN, port=0)


@asynccontextmanager
async def running(backend: FakeBackend) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(spec(), backend)
    run_task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        await supervisor.stop()
        await asyncio.gather(run_task, return_exceptions=True)


async def until(
    supervisor: Supervisor, is_so: str, worker_id: str = "decode-0", epoch: str | None = None
) -> SupervisedWorker:
    """The worker, once it is in the named stage (of the life with that epoch)."""
    version = -1
    async with asyncio.timeout(60):
        while True:
            snapshot: FleetSnapshot = await supervisor.snapshot(version)
            version = snapshot.version
            worker = next(worker for worker in snapshot.workers if worker.config.worker_id == worker_id)
            epoch_now = worker.serving.epoch if worker.serving else None
            if worker.observed.stage is WorkerStage(is_so) and epoch in (None, epoch_now):
                return worker


async def until_all_serve(supervisor: Supervisor) -> None:
    for worker in (await supervisor.snapshot()).workers:
        await until(supervisor, "serving", worker.config.worker_id)


@asynccontextmanager
async def two_decode_workers(backend: FakeBackend) -> AsyncIterator[Supervisor]:
    async with backend.control.served():
        supervisor = Supervisor(fleet_spec(ClusterConfig(prefill=1, decode=2), token=TOKEN, port=0), backend)
        run_task = asyncio.create_task(supervisor.run())
        await until_all_serve(supervisor)
        yield supervisor
        await supervisor.stop()
        await asyncio.gather(run_task, return_exceptions=True)
