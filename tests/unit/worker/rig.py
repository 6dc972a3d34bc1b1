"""Workers in one process: real hosts, rpc on loopback, real page transports, a paced model (`callers` calls them).

The paced model's tokens depend on the bytes of every page, so `expected_tokens` also says that all pages were right.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from decode_worker.request_manager import RequestManager
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.trials.chaos.injection.fake_transport import FakeTransport, FaultPlan
from twostroke.base.ids import PageId, RequestId, SessionId
from twostroke.config import CacheConfig, ModelConfig, Role, ScheduleConfig, WorkerConfig
from twostroke.engine.build import build_runner
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.window_group import window_group_of
from twostroke.request import SamplingParams
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.scheduler.values import SchedulerLimits
from twostroke.worker.host import ReadyInfo, WorkerHost
from twostroke.worker.supply.pull_spec import PullSpec
from twostroke.worker.tiers.branch import Tiers
from twostroke.worker.worker import BaseWorker, RoleServices

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

    worker: BaseWorker
    info: ReadyInfo
    plan: FaultPlan
    """The faults of the transfers that this worker starts."""

    @property
    def host(self) -> WorkerHost:
        assert self.worker._host is not None
        return self.worker._host

    @property
    def role(self) -> RoleServices:
        assert self.worker._role is not None
        return self.worker._role

    @property
    def lower(self) -> Tiers:
        """The branch of a worker with tiers."""
        return next(each for each in self.host.branches.each if isinstance(each, Tiers))

    @property
    def source(self) -> worker_pb2.PageSource:
        return worker_pb2.PageSource(worker_id=self.info.worker_id, address=self.info.address, epoch=self.info.epoch)

    @property
    def is_idle(self) -> bool:
        """Nothing is held: no page, no sequence, no pull in either direction."""
        pool, scheduler = self.host.pool, self.host.scheduler
        windows = window_group_of(pool)
        return (
            pool.unheld == pool.total
            and (windows is None or (windows.unheld == windows.shape.slots and not windows.committed))
            and not scheduler.running
            and not scheduler.waiting
            and not self.worker._open_work()
            and not self.host.pulls._sessions
        )

    def metric(self, name: str, **labels: str) -> float:
        labels = {"role": self.info.role, **labels}
        return self.host.metrics.registry.get_sample_value(f"twostroke_{name}", labels) or 0.0

    async def idle(self) -> None:
        """Waits until nothing is held, then proves that the books are right."""
        await eventually(lambda: self.is_idle)
        self.host.pool.check_integrity()


def _with_faults(worker: BaseWorker, plan: FaultPlan) -> None:
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
    worker: BaseWorker = PrefillWorker(config) if config.role is Role.PREFILL else DecodeWorker(config)
    plan = plan or FaultPlan()
    _with_faults(worker, plan)
    run_task = asyncio.create_task(worker.run())
    try:
        info = await worker.ready()
        running = Running(worker, info, plan)
        yield running
        if not worker._stop.is_set():
            await running.idle()
    finally:
        await worker.shutdown()
        await run_task
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


def answers_of(running: Running) -> RequestManager:
    assert isinstance(running.role, RequestManager)
    return running.role


def prompt_of(tokens: int, *, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 7919 + 31 * i) % VOCAB for i in range(tokens))


def expected_tokens(prompt: Sequence[int], count: int, seed: int = 1) -> list[int]:
    """What one engine without workers around it answers."""
    return [*_expected_tokens(tuple(prompt), count, seed)]


@functools.cache
def _expected_tokens(prompt: tuple[int, ...], count: int, seed: int) -> tuple[int, ...]:
    config = worker_config(Role.DECODE, pages=-(-(len(prompt) + count) // BLOCK) + 1, model=paced(step_ms=0))
    built = build_runner(config, None)

    class Silent:
        def stored(self, names) -> None: ...
        def removed(self, names) -> None: ...
        def evicting(self, page, name, parent) -> None: ...
        def forgotten(self, name) -> None: ...
        def new_writers(self, pages) -> None: ...

    scheduler = Scheduler(
        BlockPool(built.model.pages, Silent()), config.schedule, SchedulerLimits(BLOCK, 4096, (), False)
    )
    params = SamplingParams(seed=seed, max_tokens=count)
    scheduler.enqueue(
        KnownSequence(
            RequestId("r"), SessionId(1), list(prompt), len(prompt), block_hashes_of(prompt, BLOCK), b"", params
        )
    )
    answer: list[int] = []
    scheduler.admit()
    while (step := scheduler.plan()) is not None:
        answer += [emission.token.token for emission in scheduler.update(step, built.runner.run(step.batch))]
    built.close()
    assert len(answer) == count
    return tuple(answer)


def claimed(running: Running, source: worker_pb2.PageSource, prompt: Sequence[int]) -> tuple[list[PageId], PullSpec]:
    """Pages of a prompt's blocks, as a sequence would have them, and the pull that is to fill them."""
    hashes = block_hashes_of(prompt, BLOCK)
    claim = running.host.pool.claim(hashes, root_hash(), 0)
    assert claim is not None
    session = running.host.new_session()
    parts = {Part(block, GroupKind.FULL): page for block, page in enumerate(claim.pages)}
    return claim.pages, PullSpec(RequestId("r"), session, source, prompt, hashes, parts)


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
