"""A small fleet with real gRPC servers: decode workers that compute tokens from known ones, and a supervisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from router.metrics import RouterMetrics
from router.routing.selector import RoutingParams
from router.serving.dispatcher import RouterCore
from router.serving.parent_request import Attempts, ParentRequest
from tests.unit.router.serving.asking import Ask, eventually, next_token, request_snapshot
from twostroke.base.errors import Cancelled, InternalError, NotFound, PeerLost, ServeError, StaleEpoch
from twostroke.base.ids import Epoch, WorkerId
from twostroke.config import RouterConfig, RoutingConfig
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.form import KvForm
from twostroke.request import Attempt, GenerateRequest, SamplingParams
from twostroke.rpc.convert import attempt_from_message, error_to_message
from twostroke.rpc.events import batch_to_message
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, fleet_pb2, fleet_pb2_grpc, worker_pb2, worker_pb2_grpc

TOKEN = "secret"
BLOCK = 16
HEARTBEAT_S = 0.03


@dataclass
class OpenAnswer:
    """A request on a fake worker."""

    attempt: Attempt
    source: str
    tokens: list[int] = field(default_factory=list)
    first: int = 0
    """Position of tokens[0]."""
    is_finished: bool = False
    is_attached: bool = True
    task: asyncio.Task[None] | None = None


class FakeWorker(worker_pb2_grpc.DecodeServicer, worker_pb2_grpc.PagesServicer, control_pb2_grpc.ControlServicer):
    """One worker over its lives. `begin` a life, `kill` it, or only `break_tokens`."""

    def __init__(self, worker_id: str, role: str, fleet: FakeFleet) -> None:
        self.worker_id, self.role = worker_id, role
        self.fleet = fleet
        self.fingerprint = "toy/1"
        self.pool_pages = 500
        self.kv_form = KvForm("bfloat16")
        self.hold_at: int | None = None
        """No answer gets a token at or after this position while it is set."""
        self.refusal: ServeError | None = None
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.may_subscribe = asyncio.Event()
        self.may_subscribe.set()
        self.fail_answers: ServeError | None = None
        self.forgets = 0
        """Answers to come that are accepted and not kept."""
        self.step_s = 0.001
        self.load = control_pb2.Load(pages_free=500, pages_total=500, seconds_per_token=1e-4, seconds_per_step=1e-3)
        self.opens: list[worker_pb2.OpenRequest] = []
        self.closed: list[tuple[str, int]] = []
        self.attached: list[tuple[str, int]] = []
        self.fetches: list[worker_pb2.FetchRequest] = []
        self.may_fetch = asyncio.Event()
        self.may_fetch.set()
        self.finds = 0
        self.may_find = asyncio.Event()
        self.may_find.set()
        self.misses_closes = 0
        self.refused_closes: int | None = None
        """Calls of Close that were refused; None while none is to be."""
        self.log = EventLog(Epoch(0, 0))
        self.epoch = Epoch(0, 0)
        self.address = ""
        self._server: RpcServer | None = None

    async def begin(self, incarnation: int, port: int = 0) -> None:
        self.epoch = Epoch.begin(incarnation)
        self.log = EventLog(self.epoch)
        self.answers: dict[tuple[str, int], OpenAnswer] = {}
        self.streams: dict[str, asyncio.Queue[worker_pb2.TokenBatch | None]] = {}
        self.subscribers: set[asyncio.Queue[control_pb2.KvEventBatch | None]] = set()
        self._server = RpcServer("127.0.0.1", port, token=TOKEN)
        control_pb2_grpc.add_ControlServicer_to_server(self, self._server.server)
        worker_pb2_grpc.add_DecodeServicer_to_server(self, self._server.server)
        worker_pb2_grpc.add_PagesServicer_to_server(self, self._server.server)
        await self._server.start()
        self.address = self._server.address
        self._pulse = asyncio.create_task(self._heartbeat())
        self.fleet.entries[self.worker_id] = self.listed()

    def listed(self) -> fleet_pb2.WorkerEntry:
        return fleet_pb2.WorkerEntry(
            worker_id=self.worker_id,
            role=self.role,
            address=self.address,
            epoch=str(self.epoch),
            state=control_pb2.WORKER_STATE_SERVING,
        )

    async def kill(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        for task in (self._pulse, *(answer.task for answer in self.answers.values())):
            task.cancel()
        await server.stop(0)

    async def break_tokens(self) -> None:
        for queue in self.streams.values():
            queue.put_nowait(None)

    def break_events(self) -> None:
        for queue in self.subscribers:
            queue.put_nowait(None)

    async def Open(self, request, context):  # noqa: N802
        self.opens.append(request)
        await self.may_open.wait()
        if self.refusal is not None:
            raise self.refusal
        if request.worker_epoch != str(self.epoch):
            raise StaleEpoch(f"this is life {self.epoch}")
        if self.forgets:
            self.forgets -= 1
            return worker_pb2.OpenResponse()
        answer = OpenAnswer(attempt_from_message(request), request.source.worker_id)
        answer.first = len(answer.attempt.emitted)
        self.answers[request.request_id, request.attempt] = answer
        answer.task = asyncio.create_task(self._compute(answer))
        return worker_pb2.OpenResponse()

    async def _compute(self, answer: OpenAnswer) -> None:
        attempt, request = answer.attempt, answer.attempt.request
        cached = sum(name in self.log_names for name in attempt.block_hashes) * BLOCK
        known = [*request.prompt, request.sampling.choice, *(sampled.token for sampled in attempt.emitted)]
        while True:
            await asyncio.sleep(self.step_s)
            position = len(known) - len(request.prompt) - 1
            if self.hold_at is not None and position >= self.hold_at:
                continue
            if self.fail_answers is not None:
                error = error_to_message(self.fail_answers)
                self._send(answer, worker_pb2.TokenEntry(position=position, finish_reason="error", error=error))
                return
            known.append(next_token(known))
            answer.tokens.append(known[-1])
            answer.is_finished = position + 1 == request.sampling.max_tokens
            if position == answer.first:
                self._store(attempt)
            self._send(answer, self.entry(answer, position, cached if position == answer.first else 0))
            if answer.is_finished:
                return

    def entry(self, answer: OpenAnswer, position: int, cached: int = 0) -> worker_pb2.TokenEntry:
        """Tokens from `position` on."""
        return worker_pb2.TokenEntry(
            position=position,
            tokens=[worker_pb2.Token(id=token) for token in answer.tokens[position - answer.first :]],
            finish_reason="length" if answer.is_finished else "",
            drafts={"lookup": worker_pb2.DraftCounts(drafted=5, kept=3)} if answer.is_finished else None,
            cached_tokens=cached,
            lifetime={"admitted": 1.0} if position == answer.first else {},
        )

    def _send(self, answer: OpenAnswer, entry: worker_pb2.TokenEntry) -> None:
        entry.request_id, entry.attempt = answer.attempt.request_id, answer.attempt.number
        queue = self.streams.get(answer.attempt.router_id)
        answer.is_attached &= queue is not None
        if answer.is_attached:
            queue.put_nowait(worker_pb2.TokenBatch(entries=[entry]))

    async def Close(self, request, context):  # noqa: N802
        if self.refused_closes is not None:
            self.refused_closes += 1
            raise InternalError("a bug of the worker")
        if self.misses_closes:
            self.misses_closes -= 1
            raise PeerLost("broken off")
        self.closed.append((request.request_id, request.attempt))
        answer = self.answers.pop((request.request_id, request.attempt), None)
        if answer is not None:
            answer.task.cancel()
        return worker_pb2.CloseResponse()

    async def Tokens(self, request, context):  # noqa: N802
        queue = self.streams[request.router_id] = asyncio.Queue()
        numbers: dict[tuple[str, int], int] = {}
        try:
            yield worker_pb2.TokenBatch()
            while (batch := await queue.get()) is not None:
                yield in_columns(batch, numbers)
        finally:
            if self.streams.get(request.router_id) is queue:
                del self.streams[request.router_id]
                for answer in self.answers.values():
                    answer.is_attached = False

    async def Attach(self, request, context):  # noqa: N802
        answer = self.answers.pop((request.request_id, request.attempt), None)
        if answer is None:
            is_taken = any(name == request.request_id and attempt > request.attempt for name, attempt in self.answers)
            raise (Cancelled if is_taken else NotFound)(f"no open request {request.request_id}")
        attempt = request.new_attempt or request.attempt
        answer.attempt = replace(answer.attempt, number=attempt, router_id=request.router_id)
        self.answers[request.request_id, attempt] = answer
        self.attached.append((request.request_id, request.from_position))
        answer.is_attached = True
        if request.from_position < answer.first + len(answer.tokens):
            self._send(answer, self.entry(answer, request.from_position))
        return worker_pb2.AttachResponse()

    async def Find(self, request, context):  # noqa: N802
        self.finds += 1
        mine = [each for each in self.answers.values() if each.attempt.request_id[:-2] == request.stream]
        found = [request_snapshot(each.attempt, each.tokens, is_finished=each.is_finished) for each in mine]
        await self.may_find.wait()
        return worker_pb2.FindResponse(requests=found)

    async def Fetch(self, request, context):  # noqa: N802
        self.fetches.append(request)
        await self.may_fetch.wait()
        if self.refusal is not None:
            raise self.refusal
        return worker_pb2.FetchResponse(blocks=len(request.block_hashes) // 16)

    @property
    def log_names(self) -> set[bytes]:
        return set(self.log.snapshot().stored)

    def _store(self, attempt: Attempt) -> None:
        held = self.log_names
        for name in attempt.block_hashes:
            if name not in held:
                self.log.stored(name)
        self.publish()

    def publish(self) -> None:
        batch = batch_to_message(WorkerId(self.worker_id), self.epoch, self.log.publish(time.time()))
        batch.load.CopyFrom(self.load)
        for queue in self.subscribers:
            queue.put_nowait(batch)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.publish()

    async def GetServerInfo(self, request, context):  # noqa: N802
        return control_pb2.ServerInfo(
            server_id=self.worker_id, role=self.role, epoch=str(self.epoch), fingerprint=self.fingerprint
        )

    async def GetModelInfo(self, request, context):  # noqa: N802
        return control_pb2.ModelInfo(
            model="toy",
            max_model_len=4096,
            vocab_size=5000,
            block_size=BLOCK,
            page_bytes=1024,
            pool_pages=self.pool_pages,
            kv_format=self.kv_form.format,
            kv_converted_from=self.kv_form.converted_from or "",
        )

    async def SubscribeKvEvents(self, request, context):  # noqa: N802
        await self.may_subscribe.wait()
        queue: asyncio.Queue[control_pb2.KvEventBatch | None] = asyncio.Queue()
        replay = self.log.since(request.start_sequence) if request.epoch == str(self.epoch) else None
        for batch in [self.log.snapshot()] if replay is None else replay:
            message = batch_to_message(WorkerId(self.worker_id), self.epoch, batch)
            message.load.CopyFrom(self.load)
            queue.put_nowait(message)
        self.subscribers.add(queue)
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self.subscribers.discard(queue)


def in_columns(batch: worker_pb2.TokenBatch, numbers: dict[tuple[str, int], int]) -> worker_pb2.TokenBatch:
    """Returns the batch of one entry as a worker sends it; `numbers` are those of its connection so far."""
    (entry,) = batch.entries
    name = entry.request_id, entry.attempt
    is_plain = len(entry.tokens) == 1 and not entry.finish_reason and not entry.tokens[0].HasField("logprob")
    if name in numbers and is_plain:
        return worker_pb2.TokenBatch(numbers=[numbers[name]], positions=[entry.position], tokens=[entry.tokens[0].id])
    entry.number = numbers.setdefault(name, len(numbers) + 1)
    return batch


class FakeFleet(fleet_pb2_grpc.FleetServicer):
    """The supervisor's Fleet service; `show` sends the current members to all watchers."""

    def __init__(self) -> None:
        self.entries: dict[str, fleet_pb2.WorkerEntry] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.cores: list[RouterCore] = []
        self._watchers: dict[asyncio.Queue[fleet_pb2.FleetView | None], fleet_pb2.RouterEntry] = {}
        self._version = 0
        self._server: RpcServer | None = None
        self.address = ""

    async def start(self, port: int = 0) -> None:
        self._server = RpcServer("127.0.0.1", port, token=TOKEN)
        fleet_pb2_grpc.add_FleetServicer_to_server(self, self._server.server)
        await self._server.start()
        self.address = self._server.address

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def remove(self, worker_id: str) -> None:
        """The supervisor says that it is dead, whatever is true."""
        del self.entries[worker_id]
        self.show()

    async def add(self, worker_id: str, role: str = "decode", **attributes) -> FakeWorker:
        worker = self.workers[worker_id] = FakeWorker(worker_id, role, self)
        vars(worker).update(attributes)
        await worker.begin(1)
        self.show()
        return worker

    def show(self, *also: fleet_pb2.WorkerEntry) -> None:
        self._version += 1
        for queue in self._watchers:
            queue.put_nowait(self._view(*also))

    def _view(self, *also: fleet_pb2.WorkerEntry) -> fleet_pb2.FleetView:
        routers = [router for router in self._watchers.values() if router.address]
        return fleet_pb2.FleetView(version=self._version, workers=[*self.entries.values(), *also], routers=routers)

    async def Watch(self, request, context):  # noqa: N802
        queue: asyncio.Queue[fleet_pb2.FleetView | None] = asyncio.Queue()
        self._watchers[queue] = fleet_pb2.RouterEntry(router_id=request.watcher, address=request.address)
        self.show()
        try:
            while (view := await queue.get()) is not None:
                yield view
        finally:
            del self._watchers[queue]
            self.show()

    async def core(self, *, ready: bool = True, address: str = "", **settings) -> RouterCore:
        """A router core that has seen all workers; closed with the fixture."""
        routing = {name: settings.pop(name) for name in list(settings) if name in RoutingConfig.model_fields}
        config = RouterConfig(
            fleet_address=self.address, cluster_token=TOKEN, routing=RoutingConfig(**{"seed": 1, **routing}), **settings
        )
        core = RouterCore(config, RouterMetrics())
        self.cores.append(core)
        await core.start(address)
        assert core._with is not None
        core._with.placer.attempts = Attempts(clock_ns=lambda: 0)  # they count from 0
        if ready:
            await eventually(lambda: set(statuses_of(core)) == set(self.entries) and all_serving(core))
        return core


def statuses_of(core: RouterCore) -> dict[str, str]:
    return {worker.worker_id: worker.status.value for worker in core._fleet.workers}


def all_serving(core: RouterCore) -> bool:
    return set(statuses_of(core).values()) == {"serving"}


@pytest.fixture
def ask():
    def begin(
        core: RouterCore, tokens: int = 20, *, n: int = 1, prompt=None, request_id="r", deadline_s=None, **owner
    ) -> Ask:
        prompt = tuple(range(100)) if prompt is None else tuple(prompt)
        sampling = SamplingParams(seed=1, max_tokens=tokens)
        own = set(GenerateRequest.__slots__) - set(ParentRequest.__slots__)
        wanted = {name: owner.pop(name) for name in [*owner] if name in own}
        request = GenerateRequest(prompt=prompt, sampling=sampling, deadline_s=deadline_s, **wanted)
        routing = {name: owner.pop(name) for name in [*owner] if name in RoutingParams.__slots__}
        return Ask(
            core, ParentRequest(request_id=request_id, request=request, n=n, routing=RoutingParams(**routing), **owner)
        )

    return begin


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    fakes = FakeFleet()
    await fakes.start()
    try:
        yield fakes
    finally:
        for core in fakes.cores:
            await core.close()
        for worker in fakes.workers.values():
            await worker.kill()
        await fakes.stop()


@pytest.fixture
def soon():
    return eventually


@pytest.fixture
def sampled():
    def value(core: RouterCore, name: str, **labels: str) -> float:
        registry = core._metrics.registry
        return registry.get_sample_value(f"twostroke_{name}", {"role": "router", **labels}) or 0.0

    return value


@pytest.fixture
def statuses():
    return statuses_of
