"""Pulls blocks from another worker into claimed pages: read over the page transport, verify, commit.

Whatever goes wrong, each page ends either filled or without a writer, so that those who wait for it take over. Pages
that a transfer may still write to keep their writer until the transport has fenced them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from twostroke.errors import ServeError, TransferFailed
from twostroke.ids import BlockName, PageId, RequestId, SessionId
from twostroke.kv_cache.memory import PageMemory
from twostroke.kv_cache.pool import BlockPool
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.convert import names_to_bytes
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.transfer.base import Endpoint, Outcome, PageCopy, PageTransport, Peer, digest
from twostroke.transfer.registry import choose
from twostroke.worker.gate import Gate
from twostroke.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullSpec:
    """Blocks to pull for one request: `pages[block]` are claimed, arriving, and nobody's to write."""

    request_id: RequestId
    session: SessionId
    source: worker_pb2.PageSource
    tokens: Sequence[int]
    names: Sequence[BlockName]
    pages: dict[int, PageId]


@dataclass(slots=True)
class PullReport:
    """How a pull went. Blocks that are wanted but in neither count were left to local computation."""

    pulled: int = 0
    computed: int = 0
    """Of the pulled blocks, those that the source computed for this pull."""
    copied_bytes: int = 0
    first_page_s: float | None = None
    last_page_s: float | None = None
    failure: str = ""


@dataclass(slots=True, eq=False)
class _Session:
    spec: PullSpec
    remaining: dict[int, PageId]
    report: PullReport = field(default_factory=PullReport)
    task: asyncio.Task[PullReport] | None = None


class PullClient:
    def __init__(
        self,
        gate: Gate,
        pool: BlockPool,
        memory: PageMemory,
        transports: Sequence[PageTransport],
        metrics: WorkerMetrics,
        *,
        cluster_token: str,
        timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._gate = gate
        self._pool = pool
        self._memory = memory
        self._transports = transports
        self._metrics = metrics
        self._token = cluster_token
        self._timeout_s = timeout_s
        self._wake = wake
        self._channels: dict[str, PeerChannel] = {}
        self._sessions: set[_Session] = set()

    def start(self, spec: PullSpec, tasks: asyncio.TaskGroup) -> asyncio.Task[PullReport]:
        """Become the writer of the pages and pull them. The task never fails; its report says how it went."""
        for page in spec.pages.values():
            self._pool.assign_writer(page, spec.session)
        session = _Session(spec, dict(spec.pages))
        self._sessions.add(session)
        session.task = tasks.create_task(self._run(session))
        return session.task

    def prune(self) -> None:
        """Stop pulls whose missing pages nobody wants any more."""
        for session in self._sessions:
            if session.task is not None and not any(map(self._pool.is_wanted, session.remaining.values())):
                session.task.cancel()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def _run(self, session: _Session) -> PullReport:
        spec, report = session.spec, session.report
        try:
            await self._pull(session)
        except asyncio.CancelledError:
            report.failure = "unwanted"
        except TimeoutError:
            report.failure = "timeout"
        except grpc.aio.AioRpcError as error:
            report.failure = _reason(error_of(error, spec.source.address))
        except ServeError as error:
            report.failure = _reason(error)
        finally:
            self._sessions.discard(session)
            for page in session.remaining.values():
                self._pool.clear_writer(page)
            self._wake()
        if report.failure:
            self._metrics.pull_failed(report.failure.split(":")[0])
        log.info(
            "pull done request=%s source=%s blocks=%d pulled=%d bytes=%d failure=%r",
            spec.request_id, spec.source.worker_id, len(spec.pages), report.pulled, report.copied_bytes, report.failure,
        )  # fmt: skip
        return report

    async def _pull(self, session: _Session) -> None:
        spec = session.spec
        channel = await self._channel(spec.source)
        request = worker_pb2.PullRequest(
            request_id=spec.request_id,
            requester=self._gate.worker_id,
            fingerprint=self._gate.fingerprint,
            source_epoch=spec.source.epoch,
            tokens=spec.tokens,
            names=names_to_bytes(spec.names),
            wanted=sorted(spec.pages),
        )
        call = worker_pb2_grpc.PagesStub(channel.channel).Pull(request, metadata=channel.metadata)
        try:
            responses = self._responses(call)
            first = await anext(responses, None)
            if first is None:
                raise TransferFailed(f"{spec.source.worker_id} ended the pull without a word")
            transport, peer = await self._connect([Endpoint.unpack(packed) for packed in first.accepted.endpoints])
            async for response in responses:
                await self._copy(session, transport, peer, response.ready)
                if not session.remaining:
                    return
            raise TransferFailed(f"{spec.source.worker_id} ended the pull with {len(session.remaining)} blocks missing")
        finally:
            call.cancel()

    async def _responses(
        self, call: grpc.aio.UnaryStreamCall[worker_pb2.PullRequest, worker_pb2.PullResponse]
    ) -> AsyncIterator[worker_pb2.PullResponse]:
        """The call's messages, each within `timeout_s` of the one before."""
        messages = call.__aiter__()
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    message = await anext(messages)
            except StopAsyncIteration:
                return
            yield message

    async def _connect(self, endpoints: Sequence[Endpoint]) -> tuple[PageTransport, Peer]:
        transport, endpoint = choose(endpoints, self._transports)
        return transport, await transport.connect(endpoint, self._timeout_s)

    async def _copy(
        self, session: _Session, transport: PageTransport, peer: Peer, ready: worker_pb2.PagesReady
    ) -> None:
        """Copy the announced pages, verify each on our own copy, and commit those that are right."""
        announced = [page for page in ready.pages if page.block in session.remaining]
        copies = [PageCopy(PageId(p.page), session.remaining[p.block], p.generation) for p in announced]
        transfer = transport.pull(peer, copies, self._timeout_s)
        is_done = False
        try:
            result = await transport.wait(transfer)
            is_done = result.outcome is Outcome.DONE
        finally:
            if not is_done:
                await asyncio.shield(transport.fence(transfer))
        if not is_done:
            raise TransferFailed(f"{result.outcome.value}: {result.reason}")
        self._metrics.pulled(transport.name, result.copied_bytes, result.seconds)
        session.report.copied_bytes += result.copied_bytes
        session.report.computed += ready.computed
        for page in announced:
            self._commit(session, page)
        self._wake()

    def _commit(self, session: _Session, announced: worker_pb2.ReadyPage) -> None:
        page = session.remaining[announced.block]
        if digest(self._memory.page(page)) != announced.digest:
            self._metrics.digest_mismatches.inc()
            log.warning("digest mismatch request=%s block=%d", session.spec.request_id, announced.block)
            raise TransferFailed(f"block {announced.block} arrived damaged")
        del session.remaining[announced.block]
        if not self._pool.is_arriving(page):  # nobody waits for it any more
            self._pool.clear_writer(page)
            return
        self._pool.fill(page)
        report = session.report
        report.pulled += 1
        report.last_page_s = time.time()
        report.first_page_s = report.first_page_s or report.last_page_s

    async def _channel(self, source: worker_pb2.PageSource) -> PeerChannel:
        """One channel per source worker; a later life of it at another address replaces the earlier one's."""
        channel = self._channels.get(source.worker_id)
        if channel is None or channel.address != source.address:
            self._channels[source.worker_id] = PeerChannel(source.address, self._token)
            if channel is not None:
                await channel.close()
        return self._channels[source.worker_id]


def _reason(error: ServeError) -> str:
    return f"{type(error).__name__}: {error.message}"
