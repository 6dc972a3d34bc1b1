"""What a prefill and a decode worker of two forms do about pulls: real pools, rpc, sockets and conversions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tests.trials.chaos.injection.fake_transport import FakeTransport, FaultPlan
from tests.unit.transfer.fenced_epochs import metrics
from twostroke.base.ids import Epoch, PageId, RequestId, SessionId, WorkerId
from twostroke.config import Role
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.kv_cache.form import FORMS, Conversion, KvForm
from twostroke.kv_cache.memory import PageMemory
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.page_forms.page_form import PageShape
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.transfer.base import Identity, PageTransport
from twostroke.transfer.registry import open_transports
from twostroke.worker.condition import Condition
from twostroke.worker.measured.page_time import PageTime
from twostroke.worker.page_forms.converted_pages import ConvertedPages
from twostroke.worker.page_forms.converting_landing import ConvertingLanding
from twostroke.worker.page_forms.page_converter import convert
from twostroke.worker.pull_ends import DirectLanding, PageDigests
from twostroke.worker.pulls.pull_client import PullClient, PullLimits
from twostroke.worker.request_validator import RequestValidator
from twostroke.worker.services.pages_service import PagesService
from twostroke.worker.supply.pull_spec import PullReport, PullSpec

SHAPE = PageShape(2, 3, 16, 64)
TOKEN = "secret"  # of a cluster that lasts for a test
SOURCE, TARGET = "prefill-0", "decode-0"
PAGES = 64
RATE = 1e9
"""Bytes per second that the puller believes to have measured."""


def content(pages: int, form: str, seed: int = 0, shape: PageShape = SHAPE) -> npt.NDArray[np.uint8]:
    """Pages of this form as kernels store them."""
    numbers = np.random.default_rng(seed).standard_normal((pages, int(np.prod(shape.dims))), np.float32)
    plain = numbers.view(np.uint8)
    if form == "float32":
        return plain
    found = np.zeros((pages, FORMS[form].page_bytes(shape)), np.uint8)
    for original, page in zip(plain, found, strict=True):
        convert(Conversion(KvForm("float32"), KvForm(form), shape, has_pieces=False), original, page)
    return found


def _pool(memory: PageMemory) -> BlockPool:
    listener = SimpleNamespace(
        stored=lambda _: None,
        removed=lambda _: None,
        evicting=lambda *_: None,
        forgotten=lambda _: None,
        new_writers=memory.begin_new_generations,
    )
    return BlockPool(memory.pages, cast(Any, listener))


@dataclass
class TwoForms:
    conversion: Conversion
    source: PageMemory
    source_pool: BlockPool
    converted: ConvertedPages
    target: PageMemory
    target_pool: BlockPool
    landing: ConvertingLanding
    client: PullClient
    page_source: worker_pb2.PageSource
    tasks: asyncio.TaskGroup
    plan: FaultPlan
    """Faults of copies that are to be converted here."""
    rpc: RpcServer
    own_transports: list[PageTransport]

    def compute(self, tokens: Sequence[int], data: npt.NDArray[np.uint8]) -> list[PageId]:
        """The source caches a page for each token."""
        claim = self.source_pool.claim(block_hashes_of(tokens, 1), root_hash(), 0)
        assert claim is not None
        for index in claim.missing:
            self.source.page(claim.pages[index])[:] = data[index]
            self.source_pool.fill(claim.pages[index])
        self.source_pool.release(claim.pages)
        return claim.pages

    def prices(self, *, source_s: float, puller_s: float) -> None:
        """What both ends believe a conversion to take."""
        self.converted.converter._page_time = PageTime(source_s)
        self.landing.converter._page_time = PageTime(puller_s)
        now_s = asyncio.get_running_loop().time()
        self.client.links.copied(WorkerId(SOURCE), 1 << 20, (1 << 20) / RATE, now_s)

    def pull(self, tokens: Sequence[int], session: int = 1) -> tuple[list[PageId], asyncio.Task[PullReport]]:
        hashes = block_hashes_of(tokens, 1)
        claim = self.target_pool.claim(hashes, root_hash(), 0)
        assert claim is not None
        pages = {Part(block, GroupKind.FULL): claim.pages[block] for block in claim.missing}
        spec = PullSpec(
            RequestId("r"), SessionId(session), self.page_source, tokens, hashes, pages, cached_within_s=9.0
        )
        return claim.pages, self.client.start(spec, self.tasks)

    async def pull_again(self, tokens: Sequence[int], pages: dict[int, PageId]) -> PullReport:
        """Pulls blocks that have not come, into the pages that are claimed for them."""
        hashes = block_hashes_of(tokens, 1)
        parts = {Part(block, GroupKind.FULL): page for block, page in pages.items()}
        spec = PullSpec(RequestId("r"), SessionId(77), self.page_source, tokens, hashes, parts, cached_within_s=9.0)
        return await self.client.start(spec, self.tasks)

    async def kill_source(self) -> None:
        """Its calls break off, and so do connections to its pages."""
        await self.rpc.stop(grace_s=0.0)
        for transport in self.own_transports:
            await transport.close()

    @property
    def is_quiet(self) -> bool:
        """No page has a writer or a holder, and no place for arriving pages is taken."""
        return self.target_pool.unheld == self.target_pool.total and self.landing._free.full()


@contextlib.asynccontextmanager
async def two_forms(
    source_form: str,
    target_form: str,
    *,
    transport: str = "shm",
    copy_s: float = 5.0,
    shape: PageShape = SHAPE,
    pages: int = PAGES,
) -> AsyncIterator[TwoForms]:
    conversion = Conversion(KvForm(source_form), KvForm(target_form, source_form), shape, has_pieces=False)
    page_bytes = FORMS[source_form].page_bytes(shape)
    source, target = PageMemory(pages, page_bytes), PageMemory(pages, conversion.page_bytes)
    source_pool, target_pool = _pool(source), _pool(target)
    identity = Identity(SOURCE, Epoch(1, 1), f"f;form={conversion.source}", TOKEN)
    reader = Identity(TARGET, Epoch(1, 2), f"f;form={conversion.target}", TOKEN)
    plan = FaultPlan()

    def transports() -> list[Any]:
        return open_transports([transport], "127.0.0.1", 5.0)

    own, direct = transports(), transports()
    endpoints = [await each.open(source, identity) for each in own]
    for each in direct:
        each.read_into(target, reader)
    converted = ConvertedPages(source, conversion, transports())
    await converted.open(Identity(SOURCE, Epoch(1, 1), reader.fingerprint, TOKEN))
    landing = ConvertingLanding(target, conversion, [FakeTransport(each, plan) for each in transports()])
    await landing.open(Identity(TARGET, Epoch(1, 2), identity.fingerprint, TOKEN))
    progress = Condition()
    digests = [PageDigests(source), PageDigests(target)]
    view: Any = SimpleNamespace(
        pool=source_pool, loop=SimpleNamespace(wake=progress.notify),
        branches=SimpleNamespace(below=None, served=converted),
        memory=source, progress=progress,
        validator=RequestValidator(SOURCE, Epoch(1, 1), "f", metrics(Role.PREFILL), kv_form=source_form),
        metrics=metrics(Role.PREFILL), facts=SimpleNamespace(block_size=1, kv_form=conversion.source),
        digests=digests[0], endpoints=endpoints,
        config=SimpleNamespace(patience=SimpleNamespace(heartbeat_s=0.5)),
    )  # fmt: skip
    unused: Any = None
    rpc = RpcServer("127.0.0.1", 0, token=TOKEN)
    worker_pb2_grpc.add_PagesServicer_to_server(PagesService(view, unused, unused), rpc.server)
    rpc.offer("twostroke.v1.Pages")
    await rpc.start()
    client = PullClient(
        RequestValidator(TARGET, Epoch(1, 2), "f", metrics(Role.DECODE), kv_form=str(conversion.target)),
        target_pool,
        DirectLanding(digests[1], direct, pages),
        metrics(Role.DECODE),
        converting=landing,
        us=Membership(TOKEN),
        limits=PullLimits(copy_s=copy_s, silence_s=5.0),
        wake=lambda: None,
    )
    page_source = worker_pb2.PageSource(worker_id=SOURCE, address=rpc.address, epoch=str(Epoch(1, 1)))
    try:
        async with asyncio.TaskGroup() as tasks:
            yield TwoForms(
                conversion, source, source_pool, converted, target, target_pool, landing, client, page_source, tasks,
                plan, rpc, own,
            )  # fmt: skip
            client.stop()
    finally:
        await client.close()
        await rpc.stop(grace_s=0.1)
        for each in (*own, *direct):
            await each.close()
        await converted.close()
        await landing.close()
        for taken in digests:
            await taken.close()
        source.close()
        target.close()
