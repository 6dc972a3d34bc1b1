"""Serves Pull: those blocks held at once, those lacking as soon as they are computed, where the role computes. And
Fetch, a pull by this worker that somebody else asks for.

The open call is the lease. Announced pages stay pinned until it ends, by whatever way: the puller has what it wanted
and cancels, its process dies, its deadline passes. As long as it is open something is said at every heartbeat, so that
a puller can tell a long queue from a source that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc.aio

from twostroke.errors import InvalidRequest, TransferFailed
from twostroke.fault_points import Point, reach
from twostroke.ids import BlockName, PageId, RequestId
from twostroke.kv_cache.memory import Pages
from twostroke.rpc.convert import names_from_bytes
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.tracing.context import TraceContext
from twostroke.worker.digests import PageDigests
from twostroke.worker.fetch import Fetches
from twostroke.worker.host import WorkerHost
from twostroke.worker.resident import ResidentJob

News = TypeVar("News")

_ALIVE = worker_pb2.PullResponse(alive=worker_pb2.PullAlive())


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one pull asks for."""

    request_id: RequestId
    tokens: list[int]
    """Up to the last wanted block; not needed of blocks that are only read."""
    names: list[BlockName]
    """Of all blocks up to there."""
    blocks: list[int]
    peer: PeerPrefix | None
    """Where to fetch what is missing here, before anything is computed."""
    trace: TraceContext | None = None
    """The span of the pull."""


class PageJob(Protocol):
    """One pull being served; holds its pages until closed."""

    def page(self, block: int) -> PageId | None:
        """The page of a block, once it can be read. Raises TransferFailed where it never will be."""

    def was_computed(self, block: int) -> bool:
        """Whether the block was computed for this pull (and not found)."""

    def close(self) -> None:
        """Give the pages back and wake the loop, which tells those who wait for open work to end."""


class PageJobs(Protocol):
    """How a role answers pulls."""

    def begin(self, wanted: Wanted) -> PageJob: ...


class KnownDigests:
    """Generations and checksums of pages, the latter computed once per life of a page."""

    def __init__(self, memory: Pages, digests: PageDigests) -> None:
        self._memory = memory
        self._digests = digests
        self._known: dict[PageId, tuple[int, bytes]] = {}

    async def of(self, pages: Sequence[PageId]) -> list[tuple[int, bytes]]:
        """(generation, digest) of pages that are filled and pinned until this returns."""
        generations = [self._memory.generation(page) for page in pages]
        found = [self._known.get(page) for page in pages]
        unknown = [
            (page, generation)
            for page, generation, known in zip(pages, generations, found, strict=True)
            if known is None or known[0] != generation
        ]
        digests = await self._digests.of([page for page, _ in unknown])
        for (page, generation), checksum in zip(unknown, digests, strict=True):
            self._known[page] = (generation, checksum)
        return [self._known[page] for page in pages]


class PagesService(worker_pb2_grpc.PagesServicer):
    def __init__(self, host: WorkerHost, jobs: PageJobs, tasks: asyncio.TaskGroup) -> None:
        self._jobs = jobs
        self._fetches = Fetches(host, tasks)
        self._pool = host.pool
        self._wake = host.loop.wake
        self._gate = host.gate
        self._progress = host.progress
        self._metrics = host.metrics
        self._block_size = host.facts.block_size
        self._digests = KnownDigests(host.memory, host.digests)
        self._endpoints = [endpoint.pack() for endpoint in host.endpoints]
        self._heartbeat_s = host.config.patience.heartbeat_s
        self.open = 0
        """Pulls being served."""

    async def Pull(  # noqa: N802
        self, request: worker_pb2.PullRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[worker_pb2.PullResponse, None]:
        reach(Point.PAGES_ASKED)
        self._gate.check(request.fingerprint, request.source_epoch, is_work=not request.resident_only)
        wanted = self._checked(request)
        job: PageJob
        if request.resident_only:
            job = ResidentJob(self._pool, wanted.names, wanted.blocks, self._wake)
        else:
            job = self._jobs.begin(wanted)
        self.open += 1
        try:
            reach(Point.PAGES_ACCEPTED)
            accepted = worker_pb2.PullAccepted(epoch=str(self._gate.epoch), endpoints=self._endpoints)
            yield worker_pb2.PullResponse(accepted=accepted)
            async with contextlib.aclosing(
                with_heartbeats(self._announce(job, wanted.blocks), self._heartbeat_s)
            ) as said:
                async for ready in said:
                    yield _ALIVE if ready is None else worker_pb2.PullResponse(ready=ready)
        finally:
            reach(Point.PAGES_RELEASING)
            self.open -= 1
            job.close()

    async def Fetch(  # noqa: N802
        self, request: worker_pb2.FetchRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.FetchResponse:
        self._gate.check(request.fingerprint, request.worker_epoch)
        return worker_pb2.FetchResponse(blocks=await self._fetches.fetch(request))

    def _checked(self, request: worker_pb2.PullRequest) -> Wanted:
        names = names_from_bytes(request.names)
        wanted = list(request.wanted)
        if not wanted or sorted(set(wanted)) != wanted:
            raise InvalidRequest(f"wanted must be ascending block indices, got {wanted[:8]}", field="wanted")
        if wanted[-1] >= len(names):
            raise InvalidRequest(f"block {wanted[-1]} is wanted but only {len(names)} are named", field="wanted")
        blocks = wanted[-1] + 1
        tokens = list(request.tokens[: blocks * self._block_size])
        if len(tokens) < blocks * self._block_size and not request.resident_only:
            raise InvalidRequest(f"{len(tokens)} tokens do not fill {blocks} blocks", field="tokens")
        trace = TraceContext.parse(request.traceparent)
        return Wanted(RequestId(request.request_id), tokens, names[:blocks], wanted, PeerPrefix.of(request), trace)

    async def _announce(self, job: PageJob, pending: Sequence[int]) -> AsyncGenerator[worker_pb2.PagesReady, None]:
        while pending:
            ticket = self._progress.ticket()
            ready, failure = _readable(job, pending)
            if ready:
                yield await self._message(job, ready)
                pending = [block for block in pending if block not in ready]
            if failure is not None:
                raise failure
            if pending:
                await ticket.wait()
        await self._until_cancelled()

    async def _until_cancelled(self) -> None:
        """The pages stay pinned until the puller ends its call."""
        await asyncio.get_running_loop().create_future()

    async def _message(self, job: PageJob, ready: dict[int, PageId]) -> worker_pb2.PagesReady:
        known = await self._digests.of(list(ready.values()))
        pages = [
            worker_pb2.ReadyPage(block=block, page=page, generation=generation, digest=checksum)
            for (block, page), (generation, checksum) in zip(ready.items(), known, strict=True)
        ]
        reach(Point.PAGES_ANNOUNCING)
        self._metrics.served_pages.inc(len(pages))
        return worker_pb2.PagesReady(pages=pages, computed=sum(job.was_computed(block) for block in ready))


async def with_heartbeats(news: AsyncGenerator[News, None], heartbeat_s: float) -> AsyncGenerator[News | None, None]:
    """The news as they come, and None wherever there were none for `heartbeat_s`."""
    following = asyncio.ensure_future(anext(news))
    try:
        while True:
            done, _ = await asyncio.wait((following,), timeout=heartbeat_s)
            if not done:
                yield None
                continue
            try:
                told = following.result()
            except StopAsyncIteration:
                return
            yield told
            following = asyncio.ensure_future(anext(news))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await news.aclose()


def _readable(job: PageJob, blocks: Sequence[int]) -> tuple[dict[int, PageId], TransferFailed | None]:
    """The pages that can be read now, and why those after them never will be, if so."""
    ready: dict[int, PageId] = {}
    for block in blocks:
        try:
            page = job.page(block)
        except TransferFailed as error:
            return ready, error
        if page is not None:
            ready[block] = page
    return ready, None
