"""Pulls between simulated workers: a page source announces blocks as they become readable, a wire carries them.

This stands for the live pull client and the call that it makes to the pages service (`twostroke.worker.pulls`). One
pull copies one announcement after the other, and others may use the wire in between. Whatever goes wrong, each page
ends filled or without a writer, so that those who wait for it compute it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tools.simulate.fleet.worker.interfaces import SimulatedWorkerView
from twostroke.base.errors import PeerLost, ServeError, TransferFailed
from twostroke.base.ids import BlockHash, RequestId, SessionId, WorkerId
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.worker.measured.link_rates import LinkRates
from twostroke.worker.role_host import Pulls
from twostroke.worker.services.pages_service import PageJob, RequestedBlocks
from twostroke.worker.supply.open_pull import OpenPull
from twostroke.worker.supply.pull_spec import PullReport, PullSpec

COPY_PAGES = 8
"""Most pages of one announcement: about what one step of a page source computes."""


@dataclass(slots=True)
class Wire:
    """A worker's end of the network: one page batch at a time in each direction, first come first served.

    A copy keeps the way out of its source and the way into its target busy until it has ended.
    """

    bytes_per_s: float
    out_free_s: float = 0.0
    in_free_s: float = 0.0


def carry(source: Wire, target: Wire, size_bytes: float, ready_s: float) -> float:
    """Books a copy that can begin at `ready_s`. Returns when it ends."""
    begin_s = max(ready_s, source.out_free_s, target.in_free_s)
    end_s = begin_s + size_bytes / min(source.bytes_per_s, target.bytes_per_s)
    source.out_free_s = target.in_free_s = end_s
    return end_s


class Converter:
    """The thread of a page source that converts pages for workers of another form, each once while it is there."""

    def __init__(self, page_s: float) -> None:
        self._page_s = page_s
        self._free_s = 0.0
        self._converted_s: dict[BlockHash, float] = {}
        """When each page was or will be converted."""

    def convert(self, blocks: Iterable[BlockHash], now_s: float) -> float:
        """Converts these after those before them; returns when the last one is done."""
        done_s = now_s
        for block in blocks:
            if block not in self._converted_s:
                self._free_s = self._converted_s[block] = max(now_s, self._free_s) + self._page_s
            done_s = max(done_s, self._converted_s[block])
        return done_s

    def forget(self, block: BlockHash) -> None:
        """Forgets a page that was evicted, and its converted copy."""
        self._converted_s.pop(block, None)


class HostPulls(Pulls, Protocol):
    """A pull client, the live one or the simulated one, and what serves the pulls of others."""

    links: LinkRates

    def __len__(self) -> int: ...

    def announce(self) -> None:
        """Tells whoever pulls blocks from here that some may have become readable."""

    def break_off(self) -> None:
        """Ends all pulls: the worker has died, and its peers have noticed."""


class PullingWorker(SimulatedWorkerView, Protocol):
    """Either end of a pull."""

    wire: Wire
    converter: Converter
    served: dict[SimulatedPull, None]
    """Pulls of others from here."""
    changed: list[SimulatedPull]
    """Pulls of others that wait for pages, some of which may have become readable."""

    def party(self, worker: WorkerId) -> PullingWorker:
        """Returns the latest epoch of a worker."""

    def serve(self, wanted: RequestedBlocks, *, is_from_cache: bool) -> PageJob:
        """Raises InvalidRequest or Overloaded."""

    def gave(self, pages: int) -> None: ...
    def pulled(self, pages: int) -> None: ...
    def pulled_from_peer(self, request_id: RequestId) -> None: ...


class SimulatedPulls:
    def __init__(self, host: PullingWorker) -> None:
        self._host = host
        self._open: dict[SimulatedPull, None] = {}
        self.links = LinkRates()

    def __len__(self) -> int:
        return len(self._open) + len(self._host.served)

    def start(self, spec: PullSpec, tasks: asyncio.TaskGroup) -> asyncio.Future[PullReport]:
        """Becomes the writer of the pages and pulls them, as the live pull client does."""
        pull = SimulatedPull(self._host, spec, self.links, self._open.pop)
        self._open[pull] = None
        pull.start()
        return pull.report_ready

    def prune(self) -> None:
        """Stops pulls when none of their missing pages is wanted any more."""
        for pull in self._open:
            if pull.state.is_abandoned:
                pull.stop()

    def open_pulls(self) -> list[OpenPull]:
        return [pull.state for pull in self._open if pull.state.remaining]

    def stop_one(self, pull: SessionId) -> None:
        """Stops a pull although its pages are wanted: the sequences that wait for them compute them."""
        next(each for each in self._open if each.spec.session == pull).stop()

    def announce(self) -> None:
        """Blocks may have become readable: the workers that pull them from here learn of it."""
        changed, self._host.changed = self._host.changed, []
        for pull in changed:
            pull.announce()

    def break_off(self) -> None:
        """Ends the pulls of a worker that has died. Its peers have noticed."""
        for pull in list(self._host.served):
            pull.fail()
        for pull in list(self._open):
            pull.release_source()


class SimulatedPull:
    """Owned by the host that pulls."""

    def __init__(
        self, host: PullingWorker, spec: PullSpec, links: LinkRates, ended: Callable[[SimulatedPull], object]
    ) -> None:
        self._host = host
        self.spec = spec
        self.report_ready: asyncio.Future[PullReport] = host.virtual_loop.create_future()
        self.state = OpenPull(spec, host.pool, host.queue.now_s)
        self._report = PullReport()
        self._links = links
        self._ended = ended
        self._source = host.party(WorkerId(spec.source.worker_id))
        self._announced: deque[tuple[list[tuple[int, bool]], float]] = deque()
        """Blocks, whether each was computed for this pull, and when the announcement is here."""
        self._job: PageJob | None = None
        self._copying = False
        self._source_failed = False
        self._is_over = False

    def start(self) -> None:
        host, spec = self._host, self.spec
        for page in spec.parts.values():
            host.pool.assign_writer(page, spec.session)
        if spec.cached_within_s is not None:
            host.queue.after(spec.cached_within_s, lambda: self._end(TransferFailed("it took too long")))
        host.queue.after(host.shape.delays.pull_s, self._reach)

    def stop(self) -> None:
        """Says that the pages are wanted no more, or wanted from elsewhere.

        The pull ends a moment later, as a cancelled task does.
        """
        if not self.state.is_stopped:
            self.state.is_stopped = True
            self._host.virtual_loop.call_soon(self._end, None)

    def announce(self) -> None:
        """Announces at the source what has become readable."""
        job = self._job
        if job is None:
            return
        pages, failure = job.parts.take()
        ready = [(part.block, job.computed_of((part.block,)) > 0) for part in pages]
        if failure is not None:
            self._host.queue.after(self._host.shape.delays.pull_s, self._hear_failure)
        now_s = self._readable_s(ready) + self._host.shape.delays.pull_s
        if ready and not self.state.has_begun and self.spec.peer is None and not any(computed for _, computed in ready):
            self._links.answered(self._source.worker, now_s - self.state.started_s, now_s)
        self.state.has_begun |= bool(ready)
        self._announced += ((ready[start : start + COPY_PAGES], now_s) for start in range(0, len(ready), COPY_PAGES))
        self._copy()

    def _readable_s(self, ready: Sequence[tuple[int, bool]]) -> float:
        """Returns when the source can announce these blocks in the form of the worker that pulls."""
        now_s, source = self._host.queue.now_s, self._source
        if source.facts.kv_form == self._host.facts.kv_form:
            return now_s
        return source.converter.convert((self.spec.block_hashes[block] for block, _ in ready), now_s)

    def _hear_failure(self) -> None:
        self._source_failed = True
        self._copy()

    def fail(self) -> None:
        """Says that the source has died."""
        self._end(PeerLost("the source is gone"))

    def release_source(self) -> None:
        """Ends the call: the source unpins what it announced."""
        job, self._job = self._job, None
        if job is not None:
            self._source.served.pop(self, None)
            if not self._source.is_dead:
                job.close()

    def _end(self, failure: ServeError | None) -> None:
        """Ends a pull. What has not come is left to the sequences that want it."""
        if self._is_over:
            return
        self._is_over = True
        self.release_source()
        for page in self.state.remaining.values():
            self._host.pool.clear_writer(page)
        self._ended(self)
        self._report.failure = failure
        if self.state.is_stopped:
            self.report_ready.cancel()
        else:
            self.report_ready.set_result(self._report)
        self._host.wake()

    def _reach(self) -> None:
        host, spec, source = self._host, self.spec, self._source
        if self._is_over or self.state.is_stopped or host.is_dead:
            return
        if source.is_dead or str(source.epoch) != spec.source.epoch:
            host.queue.after(host.shape.delays.detection_s, self.fail)
            return
        parts = list(spec.parts)
        end = parts[-1].block + 1
        tokens = list(spec.tokens[: end * host.shape.block_size])
        wanted = RequestedBlocks(spec.request_id, tokens, list(spec.block_hashes[:end]), parts, spec.peer)
        try:
            self._job = source.serve(wanted, is_from_cache=spec.is_from_peer)
        except ServeError as error:
            self._end(error)
            return
        source.served[self] = None
        self._job.parts.on_change = lambda: source.changed.append(self)
        self.announce()

    def _copy(self) -> None:
        if self._copying or self._is_over:
            return
        if not self._announced:
            if self._source_failed:
                self._end(TransferFailed("the source does not have them"))
            return
        self._copying = True
        blocks, here_s = self._announced.popleft()
        if here_s > self._host.queue.now_s:
            self._host.queue.at(here_s, lambda: self._carry(blocks))
        else:
            self._carry(blocks)

    def _carry(self, blocks: list[tuple[int, bool]]) -> None:
        host, source = self._host, self._source
        if self._is_over or host.is_dead:
            return
        begun_s = host.queue.now_s
        end_s = carry(source.wire, host.wire, len(blocks) * host.shape.page_bytes, begun_s)
        source.gave(len(blocks))
        host.queue.at(end_s, lambda: self._copied(blocks, end_s - begun_s))

    def _copied(self, blocks: list[tuple[int, bool]], seconds: float) -> None:
        host, pool, report = self._host, self._host.pool, self._report
        self._copying = False
        host.pulled(len(blocks))
        if self._is_over or host.is_dead:
            return
        for block, was_computed in blocks:
            (page,) = self.state.came([Part(block, GroupKind.FULL)])
            if not pool.is_arriving(page):  # nobody waits for it any more
                pool.clear_writer(page)
                continue
            pool.fill(page)
            if self.spec.arrived is not None:
                self.spec.arrived(block)
            report.pulled += 1
            report.computed += was_computed
            if self.spec.is_from_peer:
                host.pulled_from_peer(self.spec.request_id)
        self._links.copied(self._source.worker, len(blocks) * host.shape.page_bytes, seconds, host.queue.now_s)
        host.wake()
        if not self.state.remaining:
            self._end(None)
        else:
            self._copy()
