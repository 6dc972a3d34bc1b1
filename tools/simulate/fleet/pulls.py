"""Pulls between simulated workers: a page source announces blocks as they become readable, the wire carries them.

One pull copies one announcement after the other, as the live pull client does; others may use the wire in between.
Whatever goes wrong, each page ends filled or without a writer, so that those who wait for it compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tools.simulate.fleet.event_queue import Entry, EventQueue
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.wire import Wire, carry
from twostroke.errors import InvalidRequest, Overloaded, TransferFailed
from twostroke.ids import BlockHash, PageId, RequestId, SessionId, WorkerId
from twostroke.kv_cache.pool import BlockPool
from twostroke.worker.pulls.pages_service import CachedOnlyJob

COPY_PAGES = 8
"""Pages of one booking of the wire: about what one step of a page source announces."""


class Job(Protocol):
    """One pull being served (as twostroke.worker.pulls.pages_service.PageJob)."""

    def page(self, block: int) -> PageId | None: ...

    def was_computed(self, block: int) -> bool: ...

    def close(self) -> None: ...


class Party(Protocol):
    """Either end: one life of a worker."""

    @property
    def worker(self) -> WorkerId: ...
    @property
    def queue(self) -> EventQueue: ...
    @property
    def shape(self) -> FleetShape: ...
    @property
    def pool(self) -> BlockPool: ...
    @property
    def wire(self) -> Wire: ...
    @property
    def served(self) -> dict[Pull, None]: ...
    @property
    def is_dead(self) -> bool: ...

    def serve(self, spec: PullSpec) -> Job:
        """Raises InvalidRequest or Overloaded."""

    def wake(self) -> None: ...
    def progressed(self) -> None: ...
    def copied(self, source: Party, pages: int, seconds: float) -> None: ...
    def gave(self, pages: int) -> None: ...
    def answered(self, source: Party, latency_s: float) -> None: ...
    def pull_ended(self, pull: Pull) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSpec:
    request_id: RequestId
    session: SessionId
    source: Party
    block_hashes: list[BlockHash]
    """Hashes of all blocks up to the last wanted one."""
    pages: dict[int, PageId]
    """Block -> claimed page, ascending; nobody's to write yet."""
    peer: Party | None = None
    peer_blocks: int = 0
    cached_within_s: float | None = None
    """Only what the source has already, and only so long; None: the source computes what it lacks."""
    from_peer: Callable[[], None] = field(default=lambda: None)
    """Told of each block that the source got from the peer."""
    arrived: Callable[[int], None] = field(default=lambda block: None)
    """Told of each block."""
    ended: Callable[[Pull], None] = field(default=lambda pull: None)


class Pull:
    """Owned by the host that pulls."""

    def __init__(self, host: Party, spec: PullSpec) -> None:
        self._host = host
        self.spec = spec
        self.remaining = dict(spec.pages)
        self.pulled = 0
        self.computed = 0
        """Pulled blocks that the source computed for this pull."""
        self._pending = list(spec.pages)
        self._pending.reverse()
        self._ready: list[tuple[int, bool]] = []
        self._job: Job | None = None
        self._timer: Entry | None = None
        self._asked_s = host.queue.now_s
        self._is_copying = False
        self._will_fail = False
        self._is_over = False
        self.has_failed = False
        """Its source died or refused it."""

    @property
    def source(self) -> str:
        return self.spec.source.worker

    @property
    def started_s(self) -> float:
        return self._asked_s

    @property
    def missing_blocks(self) -> int:
        return len(self.remaining)

    @property
    def has_begun(self) -> bool:
        """Its source has announced pages."""
        return len(self._pending) < len(self.spec.pages)

    @property
    def is_computable(self) -> bool:
        """All blocks before the first missing one are here, and nobody else waits for those that are missing."""
        pool, first = self._host.pool, min(self.remaining)
        is_reached = not first or pool.find(self.spec.block_hashes[first - 1]) is not None
        return is_reached and not any(map(pool.is_shared, self.remaining.values()))

    def start(self) -> None:
        host, spec = self._host, self.spec
        for page in spec.pages.values():
            host.pool.assign_writer(page, spec.session)
        if spec.cached_within_s is not None:
            self._timer = host.queue.after(spec.cached_within_s, self.stop)
        host.queue.after(host.shape.delays.pull_s, self._reach)

    def announce(self) -> None:
        """At the source: something may have become readable."""
        if self._job is None:
            return
        pending, before = self._pending, len(self._pending)
        try:
            while pending and self._job.page(pending[-1]) is not None:
                block = pending.pop()
                self._ready.append((block, self._job.was_computed(block)))
        except TransferFailed:
            self._will_fail = True
        if len(pending) < before and before == len(self.spec.pages) and not self._ready[0][1]:
            delay_s = self._host.shape.delays.pull_s
            self._host.answered(self.spec.source, self._host.queue.now_s + delay_s - self._asked_s)
        if len(pending) < before or self._will_fail:
            self._copy()

    def stop(self) -> None:
        """What has not come is left to whoever wants it."""
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self.release_source()
        for page in self.remaining.values():
            self._host.pool.clear_writer(page)
        self._host.pull_ended(self)
        self.spec.ended(self)
        self._host.wake()

    def fail(self) -> None:
        self.has_failed = not self._is_over
        self.stop()

    def release_source(self) -> None:
        """The call is over: the source unpins what it announced."""
        if self._job is not None:
            job, self._job = self._job, None
            self.spec.source.served.pop(self, None)
            if not self.spec.source.is_dead:
                job.close()

    def _reach(self) -> None:
        host, spec = self._host, self.spec
        if self._is_over or host.is_dead:
            return
        if spec.source.is_dead:
            host.queue.after(host.shape.delays.detection_s, self.fail)
            return
        try:
            if spec.cached_within_s is not None:
                self._job = CachedOnlyJob(spec.source.pool, spec.block_hashes, list(spec.pages), spec.source.wake)
            else:
                self._job = spec.source.serve(spec)
        except (InvalidRequest, Overloaded):
            self.fail()
            return
        spec.source.served[self] = None
        self.announce()

    def _copy(self) -> None:
        if self._is_copying or self._is_over:
            return
        if not self._ready:
            if self._will_fail:
                self.stop()
            return
        host, source = self._host, self.spec.source
        blocks, self._ready = self._ready[:COPY_PAGES], self._ready[COPY_PAGES:]
        self._is_copying = True
        ready_s = host.queue.now_s + host.shape.delays.pull_s
        end_s = carry(source.wire, host.wire, len(blocks) * host.shape.page_bytes, ready_s)
        host.copied(source, len(blocks), end_s - ready_s)
        source.gave(len(blocks))
        host.queue.at(end_s, lambda: self._copied(blocks))

    def _copied(self, blocks: list[tuple[int, bool]]) -> None:
        self._is_copying = False
        if self._is_over or self._host.is_dead:
            return
        pool = self._host.pool
        for block, was_computed in blocks:
            page = self.remaining.pop(block)
            if not pool.is_arriving(page):  # nobody waits for it any more
                pool.clear_writer(page)
                continue
            pool.fill(page)
            self.pulled += 1
            self.computed += was_computed
            self.spec.arrived(block)
        if not self.remaining:
            self.stop()
        else:
            self._copy()
            self._host.wake()
        self._host.progressed()
