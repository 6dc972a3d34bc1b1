"""The pull client pulls blocks from another worker into claimed pages: read over the page transport, verify, commit.

Each page ends either filled or without a writer, so that sequences that wait for it can compute it. Pages that a
transfer may still write to keep their writer until the transport has fenced them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from twostroke.base.errors import (
    FingerprintMismatch,
    InternalError,
    InvalidRequest,
    PeerLost,
    ServeError,
    StaleEpoch,
    TransferFailed,
)
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import Epoch, SessionId, WorkerId
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.observability.bug_log import log_bug
from twostroke.rpc.channel import PeerChannel, call_timeout_s, error_of
from twostroke.rpc.convert import hashes_to_bytes, wanted_pages, weights_to_message
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.tracing.span import OpenSpan
from twostroke.transfer.base import (
    PageCopy,
    PageEndpoint,
    PageTransport,
    Peer,
    ReadOutcome,
    TransferResult,
    fence_for_good,
    page_copies,
)
from twostroke.transfer.registry import better_transports, leading_to
from twostroke.worker.measured.link_rates import LinkRates
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.pull_ends import DirectLanding, Landing, LandingInOtherForm
from twostroke.worker.pulls.announced import AnnouncedPages, announced_pages
from twostroke.worker.pulls.pull_call import pull_responses
from twostroke.worker.request_validator import RequestValidator
from twostroke.worker.supply.open_pull import OpenPull
from twostroke.worker.supply.pull_spec import PullReport, PullSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullLimits:
    copy_s: float
    """Time limit of one copy of pages that were announced together."""
    silence_s: float
    """Silence after which a source counts as dead, also while connecting."""


@dataclass(slots=True, eq=False)
class _Session:
    spec: PullSpec
    span: OpenSpan | None
    pull: OpenPull
    report: PullReport = field(default_factory=PullReport)


@dataclass(frozen=True, slots=True)
class _Connection:
    """The connection to a source's pages, and where they arrive."""

    landing: Landing
    transport: PageTransport
    peer: Peer


class PullClient:
    def __init__(
        self,
        validator: RequestValidator,
        pool: BlockPool,
        direct: DirectLanding,
        metrics: WorkerMetrics,
        *,
        converting: LandingInOtherForm | None = None,
        us: Membership,
        limits: PullLimits,
        wake: Callable[[], None],
    ) -> None:
        self._validator = validator
        self._pool = pool
        self._direct = direct
        self._converting = converting
        self._metrics = metrics
        self._us = us
        self._limits = limits
        self._wake = wake
        self._channels: dict[str, tuple[Epoch, PeerChannel]] = {}
        """The rpc channel to one epoch of each source."""
        self._sessions: dict[_Session, asyncio.Task[PullReport]] = {}
        self.links = LinkRates()

    def start(self, spec: PullSpec, tasks: asyncio.TaskGroup) -> asyncio.Task[PullReport]:
        """Becomes the writer of the pages and pulls them.

        The task never fails, and it is cancelled when nobody wants its pages any more.
        """
        for page in spec.parts.values():
            self._pool.group_of(page).assign_writer(page, spec.session)
        span = None if spec.trace is None else spec.trace.begin("pull")
        session = _Session(spec, span, OpenPull(spec, self._pool, _now_s()))
        task = self._sessions[session] = tasks.create_task(self._run(session))
        # Not in `_run`: a task that is cancelled before its first step runs none of its code.
        task.add_done_callback(lambda _: self._ended(session))
        return task

    def prune(self) -> None:
        """Stops pulls whose missing pages nobody wants any more."""
        for session in self._sessions:
            if session.pull.is_abandoned:
                self._stop(session)

    def open_pulls(self) -> list[OpenPull]:
        return [session.pull for session in self._sessions if session.pull.remaining]

    def stop_one(self, pull: SessionId) -> None:
        """Stops a pull whose pages are still wanted: the sequences that wait for them compute them."""
        self._stop(next(session for session in self._sessions if session.spec.session == pull))

    def stop(self) -> None:
        """Stops all pulls."""
        for session in self._sessions:
            self._stop(session)

    async def close(self) -> None:
        for _, channel in self._channels.values():
            await channel.close()

    def _stop(self, session: _Session) -> None:
        if not session.pull.is_stopped:
            session.pull.is_stopped = True
            self._sessions[session].cancel()

    async def _run(self, session: _Session) -> PullReport:
        spec, report = session.spec, session.report
        try:
            await self._pull_in_time(session)
        except ServeError as error:
            report.failure = error
        except grpc.aio.AioRpcError as error:
            report.failure = error_of(error, spec.source.address)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            report.failure = PeerLost(f"{spec.source.address}: the connection was closed")
        except Exception as error:
            log_bug(log, "pull broken request=%s source=%s", spec.request_id, spec.source.worker_id, error=error)
            report.failure = InternalError(f"{type(error).__name__}: {error}")
        if report.failure is not None:
            self._metrics.pull_failed(report.failure.label(), from_peer=spec.is_from_peer)
        return report

    def _ended(self, session: _Session) -> None:
        reach(Point.PULL_ENDED)
        del self._sessions[session]
        for page in session.pull.remaining.values():
            self._pool.group_of(page).clear_writer(page)
        self._wake()
        spec, report = session.spec, session.report
        if spec.is_from_peer:
            self._metrics.pulled_from_peer(report.pulled, report.copied_bytes)
        outcome = "stopped" if session.pull.is_stopped else "done" if report.failure is None else repr(report.failure)
        if session.span is not None:
            session.span.set(
                source=spec.source.worker_id, is_from_peer=spec.is_from_peer, transport=report.transport or None,
                wanted_pages=len(spec.parts), pages=report.pulled, computed_pages=report.computed,
                bytes=report.copied_bytes, wire_s=report.wire_s, converted_pages=report.converted,
                is_stopped=session.pull.is_stopped,
            )  # fmt: skip
            session.span.end(error=None if report.failure is None else repr(report.failure))
        log.info(
            "pull ended request=%s %s=%s blocks=%d pulled=%d converted=%d bytes=%d outcome=%s",
            spec.request_id, "peer" if spec.is_from_peer else "source", spec.source.worker_id,
            spec.blocks, report.pulled, report.converted, report.copied_bytes, outcome,
        )  # fmt: skip

    async def _pull_in_time(self, session: _Session) -> None:
        within_s = session.spec.cached_within_s
        limit = asyncio.timeout(within_s)
        try:
            async with limit:
                await self._pull(session)
        except TimeoutError:
            if not limit.expired():
                raise
            worker = session.spec.source.worker_id
            raise TransferFailed(f"{worker} did not send what it holds within {within_s:.2f} s") from None

    async def _pull(self, session: _Session) -> None:
        spec, source, converting = session.spec, WorkerId(session.spec.source.worker_id), self._converting
        channel = await self._channel(spec.source)
        request = worker_pb2.PullRequest(
            request_id=spec.request_id,
            requester=self._validator.worker_id,
            fingerprint=self._validator.fingerprint,
            source_epoch=spec.source.epoch,
            tokens=spec.tokens,
            block_hashes=hashes_to_bytes(spec.block_hashes),
            wanted=wanted_pages(spec.parts),
            cached_only=spec.is_from_peer,
            kv_form=self._validator.kv_form,
            weights=weights_to_message(spec.weights),
            conversion=None if converting is None else converting.offer(self.links.of(source).bytes_per_s),
            traceparent="" if session.span is None else session.span.context.header,
        )
        if spec.peer is not None:
            spec.peer.put(request)
        reach(Point.PULL_ASKING)
        asked_s = _now_s()
        call = worker_pb2_grpc.PagesStub(channel.channel).Pull(
            request, metadata=channel.metadata, timeout=_left_s(spec.deadline_s)
        )
        async with pull_responses(call, spec.source.worker_id, self._limits.silence_s) as responses:
            accepted = (await responses.next()).accepted
            landing = self._landing(accepted.kv_form)
            endpoints = [PageEndpoint.unpack(packed) for packed in accepted.endpoints]
            connection = _Connection(landing, *await self._connect(endpoints, landing.transports))
            session.report.transport = connection.transport.name
            while session.pull.remaining:
                ready = (await responses.next()).ready
                if not session.pull.has_begun and not ready.computed and spec.peer is None:
                    now_s = _now_s()
                    self.links.answered(source, now_s - asked_s, now_s)
                session.pull.has_begun = True
                await self._take(session, connection, ready)

    def _landing(self, kv_form: str) -> Landing:
        """Returns where pages of this form arrive. Raises FingerprintMismatch for one that was not asked for."""
        if kv_form in ("", self._validator.kv_form):
            return self._direct
        if self._converting is None or kv_form != str(self._converting.form):
            raise FingerprintMismatch(f"pages are sent as {kv_form!r}, {self._validator.kv_form!r} was asked for")
        return self._converting

    async def _connect(
        self, endpoints: Sequence[PageEndpoint], transports: Sequence[PageTransport]
    ) -> tuple[PageTransport, Peer]:
        """Connects over the best transport that can, for instance not over CUDA IPC between containers.

        All attempts together take no longer than a source may be silent.
        """
        until_s = _now_s() + self._limits.silence_s
        leading = leading_to(endpoints, transports)
        for transport, endpoint in leading:
            try:
                peer = await transport.connect(endpoint, until_s - _now_s())
            except PeerLost as error:
                if (transport, endpoint) == leading[-1] or _now_s() >= until_s:
                    raise
                log.warning("page transport cannot connect transport=%s error=%s", transport.name, error)
                continue
            for better in better_transports(transport, endpoints, transports):
                self._metrics.fell_back(better)
            return transport, peer
        raise AssertionError("one of them connects, or the last one raises")

    async def _take(self, session: _Session, connection: _Connection, ready: worker_pb2.PagesReady) -> None:
        """Pulls the announced pages, batch by batch."""
        reach(Point.PULL_ANNOUNCED)
        announced = announced_pages(ready, session.pull.remaining, session.pull.source)
        report, most = session.report, connection.landing.batch_pages
        report.also_computed = min(ready.also_computed, len(session.spec.block_hashes))
        pulled_before = report.pulled
        try:
            for pages in announced:  # pages of a batch have one size
                for first in range(0, len(pages.parts), most):
                    await self._take_batch(session, connection, pages.of(first, first + most))
        finally:
            report.computed += min(ready.computed, report.pulled - pulled_before)

    async def _take_batch(self, session: _Session, connection: _Connection, announced: AnnouncedPages) -> None:
        """Copies pages, converts those of another form, verifies the copies, and commits those that are right."""
        pages = list(map(session.pull.remaining.__getitem__, announced.parts))
        landing, report = connection.landing, session.report
        async with landing.places(pages) as places:
            copies = page_copies(announced.remote, places, announced.generations)
            started_s = _now_s()
            result = await self._copy(connection, copies)
            reach(Point.PULL_COPIED)
            self._metrics.pulled(connection.transport.name, result.copied_bytes, result.seconds)
            report.copied_bytes += result.copied_bytes
            report.wire_s += result.seconds
            landed = await landing.land(places, pages)
            report.converted += landed.converted
        try:
            self._commit(session, announced, landed.digests)
            reach(Point.PULL_COMMITTED)
            now_s = _now_s()
            link_s = now_s - started_s - landed.converted_s
            self.links.copied(WorkerId(session.spec.source.worker_id), result.copied_bytes, link_s, now_s)
        finally:
            self._wake()

    async def _copy(self, connection: _Connection, copies: Sequence[PageCopy]) -> TransferResult:
        """Copies pages. Raises TransferFailed once nothing is written to them any more."""
        transport = connection.transport
        transfer = transport.pull(connection.peer, copies, self._limits.copy_s)
        is_done = False
        try:
            result = await transport.wait(transfer)
            is_done = result.outcome is ReadOutcome.DONE
        finally:
            if not is_done:
                await fence_for_good(transport, transfer)
        if not is_done:
            raise TransferFailed(f"{result.outcome.value}: {result.reason}")
        return result

    def _intact(self, announced: Sequence[bytes], arrived: Sequence[bytes]) -> int:
        """Returns how many pages have the announced digests, up to the first one that has not."""
        if announced == arrived:
            return len(announced)
        return next(index for index, pair in enumerate(zip(announced, arrived, strict=True)) if len(set(pair)) > 1)

    def _commit(self, session: _Session, announced: AnnouncedPages, arrived: Sequence[bytes]) -> None:
        """Fills the pages of one group that are right. Raises TransferFailed where one is not."""
        intact = self._intact(announced.digests, arrived)
        self._fill(session, announced.parts[:intact])
        if intact < len(announced.parts):
            block = announced.parts[intact].block
            self._metrics.digest_mismatches.inc()
            log.warning("digest mismatch request=%s block=%d", session.spec.request_id, block)
            raise TransferFailed(f"block {block} arrived damaged")

    def _fill(self, session: _Session, parts: Sequence[Part]) -> None:
        spec, report, pages = session.spec, session.report, session.pull.came(parts)
        if not pages:
            return
        group = self._pool.group_of(pages[0])
        wanted = list(map(group.is_arriving, pages))
        if not all(wanted):
            for page, is_wanted in zip(pages, wanted, strict=True):
                if not is_wanted:  # no sequence waits for it any more
                    group.clear_writer(page)
            parts, pages = list(itertools.compress(parts, wanted)), list(itertools.compress(pages, wanted))
        group.fill_all(pages)
        report.last_page_s = time.time()
        report.first_page_s = report.first_page_s or report.last_page_s
        if parts and parts[0].group is not GroupKind.FULL:  # a block counts once: by its first page, if that is pulled
            parts = [part for part in parts if Part(part.block, GroupKind.FULL) not in spec.parts]
        report.pulled += len(parts)
        if spec.arrived is not None:
            for part in parts:
                spec.arrived(part.block)

    async def _channel(self, source: worker_pb2.PageSource) -> PeerChannel:
        """Returns the channel to the given epoch of the source; a later epoch replaces an earlier one."""
        epoch = _epoch_of(source)
        known_epoch, known = self._channels.get(source.worker_id, (None, None))
        if known is not None and known_epoch == epoch:
            return known
        if known_epoch is not None and epoch.incarnation < known_epoch.incarnation:
            self._metrics.stale_epochs.inc()
            raise StaleEpoch(f"{source.worker_id} is in epoch {known_epoch}, the request names {epoch}")
        opened = PeerChannel(source.address, self._us)
        self._channels[source.worker_id] = epoch, opened
        if known is not None:
            await known.close()
        return opened


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else call_timeout_s(deadline_s - time.time())


def _epoch_of(source: worker_pb2.PageSource) -> Epoch:
    try:
        return Epoch.parse(source.epoch)
    except ValueError as error:
        raise InvalidRequest(f"{source.epoch!r} is not an epoch", field="source.epoch") from error
