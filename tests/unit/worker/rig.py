"""Workers in one process: real hosts, rpc on loopback, real page transports, a paced model; and a router's end of it.

The paced model's tokens depend on the bytes of every page, so `expected_tokens` also says that all pages were right.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from decode_worker.book import AnswerBook
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from twostroke.config import CacheConfig, ModelConfig, Role, ScheduleConfig, WorkerConfig
from twostroke.engine.build import build_runner
from twostroke.errors import ServeError
from twostroke.ids import PageId, RequestId, SessionId
from twostroke.kv_cache.block import name_blocks, root_name
from twostroke.kv_cache.pool import BlockPool, PageState
from twostroke.request import Request, SampledToken, SamplingParams
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.convert import names_to_bytes, request_to_message
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.schedule.scheduler import Limits, Scheduler
from twostroke.schedule.sequence import Sequence as KnownSequence
from twostroke.transfer.fake import FakeTransport, FaultPlan
from twostroke.worker.host import ReadyInfo, WorkerHost
from twostroke.worker.pull_client import PullSpec
from twostroke.worker.worker import RoleServices, Worker

BLOCK = 16
PAGE_BYTES = 16384
VOCAB = 2048
TOKEN = "secret"


def paced(*, prefill_tokens_per_s: float = 1e6, step_ms: float = 1.0) -> ModelConfig:
    speed = f"prefill_tokens_per_s={prefill_tokens_per_s},step_ms={step_ms},step_us_per_seq=0"
    return ModelConfig(model=f"paced:{speed},vocab={VOCAB},page_bytes={PAGE_BYTES},max_model_len=4096")


def worker_config(
    role: Role,
    worker_id: str = "",
    *,
    pages: int = 128,
    model: ModelConfig | None = None,
    schedule: ScheduleConfig | None = None,
    block_size: int = BLOCK,
    **settings,
) -> WorkerConfig:
    return WorkerConfig(
        role=role,
        worker_id=worker_id or f"{role.value}-0",
        cluster_token=TOKEN,
        model=model or paced(),
        cache=CacheConfig(block_size=block_size, kv_cache_memory_bytes=pages * PAGE_BYTES),
        schedule=schedule or ScheduleConfig(max_num_seqs=32, max_num_batched_tokens=256),
        **settings,
    )


@dataclass(eq=False)
class Running:
    """A worker that serves."""

    worker: Worker
    info: ReadyInfo
    plan: FaultPlan
    """Of the transfers that this worker starts."""

    @property
    def host(self) -> WorkerHost:
        assert self.worker._host is not None
        return self.worker._host

    @property
    def role(self) -> RoleServices:
        assert self.worker._role is not None
        return self.worker._role

    @property
    def source(self) -> worker_pb2.PageSource:
        return worker_pb2.PageSource(worker_id=self.info.worker_id, address=self.info.address, epoch=self.info.epoch)

    @property
    def is_idle(self) -> bool:
        """Nothing is held: no page, no sequence, no pull in either direction."""
        pool, scheduler = self.host.pool, self.host.scheduler
        unheld = pool.count(PageState.FREE) + pool.count(PageState.CACHED)
        return (
            unheld == pool.total
            and not scheduler.running
            and not scheduler.waiting
            and not self.worker._open_work()
            and not self.host.pulls._sessions
        )

    def metric(self, name: str, **labels: str) -> float:
        labels = {"role": self.info.role, **labels}
        return self.host.metrics.registry.get_sample_value(f"twostroke_{name}", labels) or 0.0

    async def idle(self) -> None:
        """Wait until nothing is held, then prove that the books are right."""
        await eventually(lambda: self.is_idle)
        self.host.pool.check_integrity()


def _with_faults(worker: Worker, plan: FaultPlan) -> None:
    mount = worker.mount

    def mount_with_faults(host: WorkerHost, tasks: asyncio.TaskGroup) -> RoleServices:
        host.transports[:] = [FakeTransport(transport, plan) for transport in host.transports]
        for transport in host.transports:
            transport._memory = host.memory  # the real ones are open already
        return mount(host, tasks)

    worker.mount = mount_with_faults  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def serving(config: WorkerConfig, plan: FaultPlan | None = None) -> AsyncIterator[Running]:
    """A worker that serves; at the end it must be idle (unless the test stopped it), then it is shut down."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level  # a worker's process has its own
    worker: Worker = PrefillWorker(config) if config.role is Role.PREFILL else DecodeWorker(config)
    plan = plan or FaultPlan()
    _with_faults(worker, plan)
    life = asyncio.create_task(worker.run())
    try:
        info = await worker.ready()
        running = Running(worker, info, plan)
        yield running
        if not worker._stop.is_set():
            await running.idle()
    finally:
        await worker.shutdown()
        await life
        root.handlers[:] = handlers
        root.setLevel(level)


def prefill(
    worker_id: str = "prefill-0", *, plan: FaultPlan | None = None, **settings
) -> contextlib.AbstractAsyncContextManager[Running]:
    return serving(worker_config(Role.PREFILL, worker_id, **settings), plan)


def decode(
    worker_id: str = "decode-0", *, plan: FaultPlan | None = None, **settings
) -> contextlib.AbstractAsyncContextManager[Running]:
    return serving(worker_config(Role.DECODE, worker_id, **settings), plan)


def answers_of(running: Running) -> AnswerBook:
    assert isinstance(running.role, AnswerBook)
    return running.role


def prompt_of(tokens: int, *, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 7919 + 31 * i) % VOCAB for i in range(tokens))


def expected_tokens(prompt: Sequence[int], count: int, seed: int = 1) -> list[int]:
    """What one engine without workers around it answers."""
    config = worker_config(Role.DECODE, pages=-(-(len(prompt) + count) // BLOCK) + 1, model=paced(step_ms=0))
    built = build_runner(config, None)

    class Silent:
        def stored(self, name) -> None: ...
        def removed(self, name) -> None: ...
        def new_writer(self, page) -> None: ...

    scheduler = Scheduler(BlockPool(built.model.pages, Silent()), config.schedule, Limits(BLOCK, 4096, (), False))
    params = SamplingParams(seed=seed, max_tokens=count)
    scheduler.enqueue(
        KnownSequence(RequestId("r"), SessionId(1), list(prompt), len(prompt), name_blocks(prompt, BLOCK), b"", params)
    )
    answer: list[int] = []
    scheduler.admit()
    while (step := scheduler.plan()) is not None:
        answer += [emission.token.token for emission in scheduler.settle(step, built.runner.run(step.batch))]
    built.close()
    assert len(answer) == count
    return answer


def claimed(running: Running, source: worker_pb2.PageSource, prompt: Sequence[int]) -> tuple[list[PageId], PullSpec]:
    """Pages of a prompt's blocks, as a sequence would have them, and the pull that is to fill them."""
    names = name_blocks(prompt, BLOCK)
    claim = running.host.pool.claim(names, root_name(), 0)
    assert claim is not None
    session = running.host.new_session()
    return claim.pages, PullSpec(RequestId("r"), session, source, prompt, names, dict(enumerate(claim.pages)))


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Received:
    """What a router has of one attempt, as it came."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    entries: list[worker_pb2.TokenEntry] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def last(self) -> worker_pb2.TokenEntry:
        return self.entries[-1]


class Router:
    """A router's end of one decode worker: a token stream and what came over it."""

    def __init__(self, worker: ReadyInfo, router_id: str = "router-0", token: str = TOKEN) -> None:
        self.worker, self.router_id = worker, router_id
        self.batches: list[worker_pb2.TokenBatch] = []
        self.received: dict[tuple[str, int], Received] = {}
        self.stream_ended = asyncio.Event()
        self._peer = PeerChannel(worker.address, token)
        self._stub = worker_pb2_grpc.DecodeStub(self._peer.channel)
        self._call: grpc.aio.UnaryStreamCall | None = None
        self._reader: asyncio.Task[None] | None = None

    async def connect(self) -> Router:
        """Begin a (new) token stream; returns when the worker has greeted it."""
        self.stream_ended = asyncio.Event()
        request = worker_pb2.TokensRequest(router_id=self.router_id)
        self._call = self._stub.Tokens(request, metadata=self._peer.metadata)
        assert not (await self._call.read()).entries
        self._reader = asyncio.create_task(self._read(self._call, self.stream_ended))
        return self

    async def disconnect(self) -> None:
        assert self._call is not None
        assert self._reader is not None
        self._call.cancel()
        await self._reader

    async def aclose(self) -> None:
        if self._reader is not None:
            await self.disconnect()
        await self._peer.close()

    async def _read(self, call: grpc.aio.UnaryStreamCall, ended: asyncio.Event) -> None:
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            while isinstance(batch := await call.read(), worker_pb2.TokenBatch):
                self.batches.append(batch)
                for entry in batch.entries:
                    self._take(entry)
        ended.set()

    def _take(self, entry: worker_pb2.TokenEntry) -> None:
        got = self.of(entry.request_id, entry.attempt)
        got.entries.append(entry)
        got.tokens += [token.id for token in entry.tokens]
        got.positions += range(entry.position, entry.position + len(entry.tokens))
        if entry.finish_reason:
            got.done.set()

    def of(self, request_id: str = "r", attempt: int = 0) -> Received:
        return self.received.setdefault((request_id, attempt), Received())

    def message(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        request_id: str = "r",
        attempt: int = 0,
        source: Running | worker_pb2.PageSource | None = None,
        peer: PeerPrefix | None = None,
        emitted: Sequence[int] = (),
        deadline_s: float | None = None,
        seed: int = 1,
        **changes,
    ) -> worker_pb2.OpenRequest:
        request = Request(
            request_id=RequestId(request_id),
            attempt=attempt,
            prompt=tuple(prompt),
            emitted=tuple(SampledToken(token) for token in emitted),
            names=tuple(name_blocks([*prompt, *emitted], BLOCK)),
            sampling=SamplingParams(seed=seed, max_tokens=max_tokens),
            deadline_s=deadline_s,
            router_id=self.router_id,
        )
        message = request_to_message(
            request,
            fingerprint=self.worker.fingerprint,
            worker_epoch=self.worker.epoch,
            source=source.source if isinstance(source, Running) else source,
            peer=peer,
        )
        for name, value in changes.items():
            if isinstance(value, list):
                getattr(message, name)[:] = value
            else:
                setattr(message, name, value)
        return message

    async def open(self, prompt: Sequence[int], max_tokens: int = 8, **options) -> Received:
        """Raises the ServeError that the worker answered with."""
        return await self.send(self.message(prompt, max_tokens, **options))

    async def send(self, message: worker_pb2.OpenRequest) -> Received:
        await self._ask(self._stub.Open(message, metadata=self._peer.metadata))
        return self.of(message.request_id, message.attempt)

    async def close(self, request_id: str = "r", attempt: int = 0) -> None:
        request = worker_pb2.CloseRequest(request_id=request_id, attempt=attempt)
        await self._ask(self._stub.Close(request, metadata=self._peer.metadata))

    async def attach(self, request_id: str = "r", attempt: int = 0, *, from_position: int, **taking) -> None:
        """`taking`: take_as and deadline_s."""
        request = worker_pb2.AttachRequest(
            request_id=request_id, attempt=attempt, router_id=self.router_id, from_position=from_position, **taking
        )
        await self._ask(self._stub.Attach(request, metadata=self._peer.metadata))

    async def find(self, stream: str) -> list[worker_pb2.FoundAnswer]:
        call = self._stub.Find(worker_pb2.FindRequest(stream=stream), metadata=self._peer.metadata)
        return list((await self._ask(call)).answers)

    async def answer(self, prompt: Sequence[int], max_tokens: int = 8, **options) -> Received:
        """Open, and wait for the end."""
        got = await self.open(prompt, max_tokens, **options)
        async with asyncio.timeout(10):
            await got.done.wait()
        return got

    async def _ask(self, call):
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.worker.address) from error


@contextlib.asynccontextmanager
async def router_to(running: Running, router_id: str = "router-0") -> AsyncIterator[Router]:
    """A connected router."""
    async with contextlib.aclosing(Router(running.info, router_id)) as router:
        yield await router.connect()


class Puller:
    """A bare client of Pages, for what a well-behaved worker never does."""

    def __init__(self, source: ReadyInfo, token: str = TOKEN) -> None:
        self._source = source
        self._peer = PeerChannel(source.address, token)

    def pull(self, tokens: Sequence[int], wanted: Sequence[int] | None = None, **changes) -> grpc.aio.UnaryStreamCall:
        names = name_blocks(tokens, BLOCK)
        fields: dict = {
            "fingerprint": self._source.fingerprint,
            "source_epoch": self._source.epoch,
            "tokens": tokens,
            "names": names_to_bytes(names),
            "wanted": range(len(names)) if wanted is None else wanted,
        }
        stub = worker_pb2_grpc.PagesStub(self._peer.channel)
        return stub.Pull(worker_pb2.PullRequest(**fields | changes), metadata=self._peer.metadata)

    async def pages(self, call: grpc.aio.UnaryStreamCall, count: int) -> list[worker_pb2.PagesReady]:
        """Messages until `count` pages are announced. Raises the ServeError that ended the pull."""
        messages: list[worker_pb2.PagesReady] = []
        try:
            async with asyncio.timeout(10):
                while sum(len(message.pages) for message in messages) < count:
                    response = await call.read()
                    assert response is not grpc.aio.EOF
                    if response.HasField("ready"):
                        messages.append(response.ready)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._source.address) from error
        return messages

    async def refusal(self, call: grpc.aio.UnaryStreamCall) -> ServeError:
        """The ServeError that the source answers with."""
        try:
            async with asyncio.timeout(10):
                while await call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return error_of(error, self._source.address)
        raise AssertionError("the pull ended without an error")

    async def aclose(self) -> None:
        await self._peer.close()


def with_epoch(source: worker_pb2.PageSource, epoch: str) -> worker_pb2.PageSource:
    return worker_pb2.PageSource(worker_id=source.worker_id, address=source.address, epoch=epoch)
