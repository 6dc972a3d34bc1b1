"""The Pages service serves Pull: cached blocks at once, and missing ones as soon as the role has computed them.

The open call is the lease: announced pages stay held until it ends, however it ends. A heartbeat is sent while it is
open, so that a puller can tell a long queue from a dead source. Fetch asks this worker to pull from another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc.aio

from twostroke.base.errors import FingerprintMismatch, InvalidRequest, TransferFailed
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import BlockHash, PageId, RequestId
from twostroke.kv_cache.groups.group_view import GroupView
from twostroke.kv_cache.parts import GroupKind, Part, blocks_of, parts_from
from twostroke.kv_cache.pool import BlockPool
from twostroke.request import WeightsRef
from twostroke.rpc.convert import hashes_from_bytes, weights_from_message
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.tracing.span import TraceContext
from twostroke.worker.branches import LowerPages
from twostroke.worker.condition import MANY_BYTES, Gathering
from twostroke.worker.host import WorkerHost
from twostroke.worker.pull_ends import OwnPages, ServedPages
from twostroke.worker.pulls.announced import announcement
from twostroke.worker.services.fetch import BlockFetcher
from twostroke.worker.services.ready_parts import ReadyParts

Message = TypeVar("Message")

_ALIVE = worker_pb2.PullResponse(alive=worker_pb2.PullAlive())


@dataclass(frozen=True, slots=True)
class RequestedBlocks:
    """The checked request of one pull."""

    request_id: RequestId
    tokens: list[int]
    """Tokens up to the last wanted block; may be empty in a cached-only pull."""
    block_hashes: list[BlockHash]
    """Hashes of all blocks up to the last wanted one."""
    parts: list[Part]
    """Wanted parts, in order."""
    peer: PeerPrefix | None
    """A worker that holds a prefix: missing blocks are fetched there before any is computed."""
    trace: TraceContext | None = None
    """The puller's span of the pull."""
    weights: WeightsRef | None = None
    """Weights besides the model's with which missing blocks are computed."""


class PageJob(Protocol):
    """One pull being served; holds its pages until closed."""

    @property
    def parts(self) -> ReadyParts:
        """The wanted parts that have not been announced."""

    def readable(self) -> list[PageId]:
        """Returns the pages of the first wanted parts that can be read now, up to one that never will be. O(parts)."""

    def computed_of(self, blocks: Collection[int]) -> int:
        """Returns how many of these blocks were computed for this pull, and not cached."""

    def computed_besides(self, blocks: Collection[int]) -> int:
        """Returns how many other blocks were computed for this pull, although their pages are not wanted."""

    def close(self) -> None:
        """Releases the pages and wakes the loop, which notifies those that wait for open work to end."""


class PageJobs(Protocol):
    """The role's factory of page jobs."""

    def begin(self, wanted: RequestedBlocks) -> PageJob: ...


class PagesService(worker_pb2_grpc.PagesServicer):
    def __init__(self, host: WorkerHost, jobs: PageJobs, tasks: asyncio.TaskGroup) -> None:
        self._jobs = jobs
        self._fetches = BlockFetcher(host, tasks)
        self._pool = host.pool
        self._wake = host.loop.wake
        self._loads = host.branches.below
        self._validator = host.validator
        self._metrics = host.metrics
        self._block_size = host.facts.block_size
        self._own = OwnPages(host.facts.kv_form, host.memory, host.digests, host.endpoints)
        self._converted = host.branches.served
        self._enough = max(1, MANY_BYTES // host.memory.page_bytes)
        """Pages that are announced without waiting for more."""
        self._heartbeat_s = host.config.patience.heartbeat_s
        self.open = 0
        """Pulls being served."""

    async def Pull(  # noqa: N802
        self, request: worker_pb2.PullRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[worker_pb2.PullResponse, None]:
        reach(Point.PAGES_ASKED)
        self._validator.check(request.fingerprint, request.source_epoch, is_work=not request.cached_only)
        self._check_form(request)
        wanted = self._checked(request)
        job: PageJob
        if request.cached_only:
            job = CachedOnlyJob(self._pool, wanted, self._wake, self._loads)
        else:
            job = self._jobs.begin(wanted)
        self.open += 1
        try:
            reach(Point.PAGES_ACCEPTED)
            served = self._served_to(request, job, wanted.parts)
            endpoints = [endpoint.pack() for endpoint in served.endpoints]
            form = str(served.form) if request.kv_form else ""
            accepted = worker_pb2.PullAccepted(epoch=str(self._validator.epoch), endpoints=endpoints, kv_form=form)
            yield worker_pb2.PullResponse(accepted=accepted)
            async with contextlib.aclosing(with_heartbeats(self._announce(job, served), self._heartbeat_s)) as messages:
                async for ready in messages:
                    yield _ALIVE if ready is None else worker_pb2.PullResponse(ready=ready)
        finally:
            reach(Point.PAGES_RELEASING)
            self.open -= 1
            job.close()

    async def Fetch(  # noqa: N802
        self, request: worker_pb2.FetchRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.FetchResponse:
        self._validator.check(request.fingerprint, request.worker_epoch)
        return worker_pb2.FetchResponse(blocks=await self._fetches.fetch(request))

    def _check_form(self, request: worker_pb2.PullRequest) -> None:
        """Refuses a puller whose page form is not served here. Raises FingerprintMismatch."""
        forms = [str(served.form) for served in (self._own, self._converted) if served is not None]
        if request.kv_form not in ("", *forms):
            raise FingerprintMismatch(
                f"{request.requester} stores pages as {request.kv_form!r}, {self._validator.worker_id} serves them as "
                f"{' or '.join(map(repr, forms))}"
            )

    def _served_to(self, request: worker_pb2.PullRequest, job: PageJob, parts: Sequence[Part]) -> ServedPages:
        """Returns the pages in the puller's form, or in the own form where the puller is to convert them."""
        if self._converted is None or request.kv_form in ("", str(self._own.form)):
            return self._own
        is_for_puller = self._converted.is_for_puller(
            request.conversion, self._own.page_bytes, len(parts), job.readable()
        )
        return self._own if is_for_puller else self._converted

    def _checked(self, request: worker_pb2.PullRequest) -> RequestedBlocks:
        hashes = hashes_from_bytes(request.block_hashes)
        if len(set(hashes)) < len(hashes):
            raise InvalidRequest("block_hashes has a block twice", field="block_hashes")
        parts = self._wanted_parts(request)
        blocks = parts[-1].block + 1
        if blocks > len(hashes):
            raise InvalidRequest(
                f"block {blocks - 1} is wanted, but there are only {len(hashes)} block hashes", field="wanted"
            )
        tokens = request.tokens[: blocks * self._block_size]
        if len(tokens) < blocks * self._block_size and not request.cached_only:
            raise InvalidRequest(f"{len(tokens)} tokens do not fill {blocks} blocks", field="tokens")
        trace = TraceContext.parse(request.traceparent)
        weights = weights_from_message(request.weights) if request.HasField("weights") else None
        peer, request_id = PeerPrefix.of(request), RequestId(request.request_id)
        return RequestedBlocks(request_id, tokens, hashes[:blocks], parts, peer, trace, weights)

    def _wanted_parts(self, request: worker_pb2.PullRequest) -> list[Part]:
        """Returns the wanted parts, in order. Raises InvalidRequest."""
        parts: list[Part] = []
        groups = [wanted.group for wanted in request.wanted]
        are_ascending = groups == sorted(set(groups))
        for wanted in request.wanted:
            if wanted.group >= len(self._pool.groups):
                raise InvalidRequest(f"this model has no page group {wanted.group}", field="wanted")
            blocks, group = wanted.blocks[:], GroupKind(wanted.group)
            if not are_ascending or blocks != sorted(set(blocks)):
                raise InvalidRequest("wanted must be ascending block indices of ascending page groups", field="wanted")
            parts += parts_from(blocks, itertools.repeat(group))
        if not parts:
            raise InvalidRequest("wanted must be ascending block indices, and names none", field="wanted")
        return parts if len(groups) == 1 else sorted(parts)

    async def _announce(self, job: PageJob, served: ServedPages) -> AsyncGenerator[worker_pb2.PagesReady, None]:
        announced: set[int] = set()
        """Blocks of which a part was announced."""
        gathering = Gathering()
        while not job.parts.is_empty:
            await job.parts.wait()
            if gathering.left_s:
                await job.parts.gather(gathering.left_s, self._enough)
            ready, failure = job.parts.take()
            if ready:
                gathering.sent()
                is_last = job.parts.is_empty
                message = await self._message(ready, served)
                new = {part.block for part in ready} - announced
                announced |= new
                message.computed = job.computed_of(new)
                message.also_computed = job.computed_besides(announced) if is_last else 0
                yield message
            if failure is not None:
                raise failure
        await self._until_cancelled()

    async def _until_cancelled(self) -> None:
        """Waits for the end of the call; the pages stay held until then."""
        await asyncio.get_running_loop().create_future()

    async def _message(self, ready: dict[Part, PageId], served: ServedPages) -> worker_pb2.PagesReady:
        """Returns the message of parts that can be read."""
        known = await served.of(list(ready.values()))
        reach(Point.PAGES_ANNOUNCING)
        self._metrics.served_pages.inc(len(ready))
        return announcement(ready, known)


async def with_heartbeats(
    messages: AsyncGenerator[Message, None], heartbeat_s: float
) -> AsyncGenerator[Message | None, None]:
    """Yields the messages as they come, and None after each `heartbeat_s` without one."""
    following = asyncio.ensure_future(anext(messages))
    try:
        while True:
            done, _ = await asyncio.wait((following,), timeout=heartbeat_s)
            if not done:
                yield None
                continue
            try:
                message = following.result()
            except StopAsyncIteration:
                return
            yield message
            following = asyncio.ensure_future(anext(messages))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await messages.aclose()


def filled(pool: GroupView, parts: Sequence[Part], page_of: Callable[[Part], PageId | None]) -> list[PageId]:
    """Returns the filled pages of the first parts, up to one that never will be filled. O(parts)."""
    pages: list[PageId] = []
    with contextlib.suppress(TransferFailed):
        for part in parts:
            page = page_of(part)
            if page is not None and pool.is_filled(page):
                pages.append(page)
    return pages


class CachedOnlyJob:
    """Serves a pull only from the cache: it holds the wanted blocks that were in the pool or below when it began."""

    def __init__(
        self,
        pool: BlockPool,
        wanted: RequestedBlocks,
        wake: Callable[[], None],
        loads: LowerPages | None = None,
    ) -> None:
        self._pool = pool
        self._wanted = wanted.parts
        self._wake = wake
        self._loads = loads
        self._held: dict[GroupKind, dict[int, PageId]] = {}
        """Pages by group and block. Where a further group's page of a block is held, the first group's is held, too."""
        hashes, blocks = wanted.block_hashes, sorted({part.block for part in wanted.parts})
        for kind, group in zip(GroupKind, pool.groups, strict=False):
            if kind is not GroupKind.FULL:
                blocks = [block for block in blocks_of(wanted.parts, kind) if block in self._held[GroupKind.FULL]]
            held = self._held[kind] = group.share_filled({block: hashes[block] for block in blocks})
            if loads is not None:
                held |= loads.share(kind, hashes, [block for block in blocks if block not in held])
        self.parts = ReadyParts(pool, wanted.parts, self._page)
        self.parts.change()

    def readable(self) -> list[PageId]:
        return filled(self._pool, self._wanted, self._page)

    def computed_of(self, blocks: Collection[int]) -> int:
        return 0

    def computed_besides(self, blocks: Collection[int]) -> int:
        return 0

    def close(self) -> None:
        self.parts.close()
        for kind, held in reversed(self._held.items()):
            self._pool.groups[kind].unshare([held[block] for block in sorted(held)])
        if self._loads is not None:
            self._loads.give_up_unwanted()
        self._wake()

    def _held_page(self, part: Part) -> PageId | None:
        return self._held[part.group].get(part.block)

    def _page(self, part: Part) -> PageId:
        page = self._held_page(part)
        if page is None or not (self._pool.is_filled(page) or self._pool.writer(page) is not None):
            raise TransferFailed(f"block {part.block} is not cached here, and the pull is cached-only")
        return page
