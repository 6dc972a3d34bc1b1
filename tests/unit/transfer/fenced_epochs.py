"""Epochs of workers that others pull from: the real pool, validator, handshake and page service, under a clock that
stands still."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from twostroke.base.errors import Overloaded, PeerLost, ServeError
from twostroke.base.ids import BlockHash, Epoch, PageId
from twostroke.config import Role
from twostroke.kv_cache.block import HASH_BYTES, root_hash
from twostroke.kv_cache.form import KvForm
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory
from twostroke.kv_cache.parts import Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.rpc.v1 import worker_pb2
from twostroke.transfer.base import Identity, PageEndpoint
from twostroke.transfer.sockets import handshake
from twostroke.worker.condition import Condition
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.pull_ends import PageDigests
from twostroke.worker.request_validator import RequestValidator
from twostroke.worker.services.pages_service import PagesService, RequestedBlocks
from twostroke.worker.services.ready_parts import ReadyParts

SOURCE_PAGES = 4
SOURCE_LAYOUT = PoolLayout.of(SOURCE_PAGES, HASH_BYTES)
TURNS = 30
"""Rounds of the event loop after which everything that can happen by itself has happened."""


class StillLoop(asyncio.SelectorEventLoop):
    """Time passes when it is told to."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def synchronize(self) -> None:
        self.run_until_complete(_turns())

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.101
            self.synchronize()


async def _turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


@functools.cache
def metrics(role: Role) -> WorkerMetrics:
    return WorkerMetrics(role, 1)


class Bytes:
    """A pool and its memory; a page holds its block exactly if its bytes are the block's name."""

    def __init__(self, pages: int) -> None:
        self.memory = PageMemory(pages, HASH_BYTES)
        listener = SimpleNamespace(
            stored=lambda _: None,
            removed=lambda _: None,
            evicting=lambda *_: None,
            forgotten=lambda _: None,
            new_writers=self.memory.begin_new_generations,
        )
        self.pool = BlockPool(pages, cast(Any, listener))

    def write(self, page: PageId, name: BlockHash) -> None:
        self.memory.page(page)[:] = np.frombuffer(name, np.uint8)

    def check(self) -> None:
        self.pool.check_integrity()
        for name, page in self.pool._by_hash.items():
            if self.pool.is_filled(page):
                assert self.memory.page(page).tobytes() == name, f"page {page} is readable as a block that it is not"


class WorkerEpoch(Bytes):
    """One epoch of a worker that serves pages, and computes those that it lacks when it is told to."""

    def __init__(self, worker_id: str, incarnation: int) -> None:
        super().__init__(SOURCE_PAGES)
        self.worker_id, self.epoch = worker_id, Epoch(incarnation, incarnation + 100)
        self.identity = Identity(worker_id, self.epoch, "f", "token")
        self.handshake = handshake.ReaderValidator(self.identity, SOURCE_LAYOUT)
        self.progress = Condition()
        self.endpoint = PageEndpoint("played", worker_id, "here", self.epoch, "f", SOURCE_LAYOUT)
        self.is_cut = False
        """Nothing that it says arrives, and it hears of nothing."""
        host = SimpleNamespace(
            pool=self.pool,
            loop=SimpleNamespace(wake=self.progress.notify),
            validator=RequestValidator(worker_id, self.epoch, "f", metrics(Role.PREFILL)),
            progress=self.progress,
            metrics=metrics(Role.PREFILL),
            facts=SimpleNamespace(block_size=1, kv_form=KvForm("")),
            memory=self.memory,
            digests=PageDigests(self.memory),
            endpoints=[self.endpoint],
            branches=SimpleNamespace(below=None, served=None),
            config=SimpleNamespace(patience=SimpleNamespace(heartbeat_s=0.5)),
        )
        self.service = PagesService(cast(Any, host), self, cast(Any, None))

    @property
    def source(self) -> worker_pb2.PageSource:
        return worker_pb2.PageSource(worker_id=self.worker_id, address=self.worker_id, epoch=str(self.epoch))

    def begin(self, wanted: RequestedBlocks) -> _Job:
        claim = self.pool.claim(wanted.block_hashes, root_hash(), 0)
        if claim is None:
            raise Overloaded("no room")
        return _Job(self, wanted.parts, claim.pages)

    def compute(self) -> None:
        """Computes one of the blocks that somebody waits for."""
        for name, page in self.pool._by_hash.items():
            if self.pool.is_arriving(page):
                self.write(page, name)
                self.pool.fill(page)
                self.progress.notify()
                return

    def use(self, names: Sequence[BlockHash]) -> None:
        """Computes these for nobody: whatever is pinned stays, other pages are given new lives."""
        claim = self.pool.claim(names, root_hash(), 0)
        if claim is not None:
            for index in claim.missing:
                self.write(claim.pages[index], names[index])
                self.pool.fill(claim.pages[index])
            self.pool.release(claim.pages)


class _Job:
    def __init__(self, worker_epoch: WorkerEpoch, wanted: Sequence[Part], pages: list[PageId]) -> None:
        self._worker_epoch, self._pages = worker_epoch, pages
        self.parts = ReadyParts(worker_epoch.pool, wanted, self._page)
        self.parts.change()

    def readable(self) -> list[PageId]:
        return list(filter(self._worker_epoch.pool.is_filled, self._pages))

    def _page(self, part: Part) -> PageId:
        return self._pages[part.block]

    def computed_of(self, blocks: Collection[int]) -> int:
        return len(blocks)

    def computed_besides(self, blocks: Collection[int]) -> int:
        return 0

    def close(self) -> None:
        self.parts.close()
        self._worker_epoch.pool.release(self._pages)


class Call:
    """A Pull between two workers, both ends."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, worker_epoch: WorkerEpoch, request: worker_pb2.PullRequest
    ) -> None:
        self.worker_epoch = worker_epoch
        self._said: asyncio.Queue[worker_pb2.PullResponse | Exception] = asyncio.Queue()
        self._late: list[worker_pb2.PullResponse | Exception] = []
        self._wants_end = False
        self._serving = loop.create_task(self._serve(request))

    @property
    def is_open(self) -> bool:
        """The source pins pages for it."""
        return not self._serving.done()

    async def read(self) -> worker_pb2.PullResponse:
        said = await self._said.get()
        if isinstance(said, Exception):
            raise said
        return said

    def cancel(self) -> None:
        self._wants_end = True
        self.pass_on()

    def pass_on(self) -> None:
        """Whatever the link lets through."""
        if not self.worker_epoch.is_cut:
            while self._late:
                self._said.put_nowait(self._late.pop(0))
            if self._wants_end:
                self._serving.cancel()

    def drop(self) -> None:
        """The source takes its puller for dead; the puller is not told."""
        self._serving.cancel()

    def break_off(self) -> None:
        self._serving.cancel()
        self._said.put_nowait(PeerLost("killed"))

    async def _serve(self, request: worker_pb2.PullRequest) -> None:
        try:
            async with contextlib.aclosing(self.worker_epoch.service.Pull(request, cast(Any, None))) as said:
                async for message in said:
                    self._late.append(message)
                    self.pass_on()
        except ServeError as error:
            self._late.append(error)
            self.pass_on()
