"""Loads under way: read on threads, verified, then readable like computed blocks.

A load is given up if computing or pulling would have been done sooner, or if nobody waits for it any more. It is the
writer of its pages meanwhile, so one load serves all sequences that wait. What does not come is handed on to the
suppliers after it, and computed if there are none.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import BlockHash, PageId, SessionId
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.tier import Tier
from twostroke.worker.supply.supply import Behind
from twostroke.worker.tiers.loads.prices import LoadPrices
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.price import Price, is_late
from twostroke.worker.tiers.reader import DamagedPage, PageRead, ReaderThread, ReadJob, TierReaders

log = logging.getLogger(__name__)

LOOK_S = 0.005
"""Least seconds between two checks of whether a load is late."""


@dataclass(slots=True, eq=False)
class _Load:
    group: GroupKind
    """The group of the parts that it brings."""
    tiers: PageTiers
    """The tiers of that group."""
    tier: Tier
    readers: TierReaders[Any]
    thread: ReaderThread[Any]
    job: ReadJob[Any]
    session: SessionId
    remaining: dict[int, PageId]
    """Pages that have not come, by their index in the load."""
    price: Price
    behind: Behind | None
    """Suppliers to which it hands on what it does not bring."""
    started_s: float
    wait_s: float
    """Predicted time until its first page is read."""
    ended: Callable[[], None]
    parents: Mapping[int, BlockHash]
    """Parents of its blocks if it reads the last one first while those before the first are computed; else empty."""
    arrived: int = 0
    timer: asyncio.TimerHandle | None = field(default=None)


class RunningLoads:
    """Loads of one epoch of a worker. One owner, one thread: the event loop."""

    def __init__(
        self,
        tiers: Sequence[PageTiers],
        pool: BlockPool,
        prices: LoadPrices,
        *,
        new_session: Callable[[], SessionId],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`tiers` are those of each group; `wake` is called as pages arrive."""
        self._tiers = tiers
        self._pool = pool
        self._prices = prices
        self._new_session = new_session
        self._wake = wake
        self._clock = clock
        self._open: set[_Load] = set()
        for number, each in enumerate(tiers):
            each.when_turned_off(functools.partial(self._give_up_tier, GroupKind(number)))

    @property
    def open(self) -> int:
        """Loads that have not ended."""
        return len(self._open)

    def pending(self, group: GroupKind, tier: Tier) -> int:
        """Returns the pages of a group that loads from a tier have yet to bring."""
        return sum(len(load.remaining) for load in self._open if load.group is group and load.tier is tier)

    def start(
        self,
        group: GroupKind,
        tier: Tier,
        reads: list[PageRead[Any]],
        price: Price,
        behind: Behind | None,
        parents: Mapping[int, BlockHash] | None = None,
    ) -> None:
        """Begins a load; with `parents` of its blocks, computing may take over its first ones."""
        if not reads:
            return
        tiers, session, loop = self._tiers[group], self._new_session(), asyncio.get_running_loop()
        readers = tiers.readers(tier)
        thread = readers.thread_for(len(reads))
        for read in reads:
            self._pool.group_of(read.page).assign_writer(read.page, session)
        reach(Point.TIER_LOADING)
        release = tiers.hold(tier, [read.place for read in reads])

        def notify() -> None:
            loop.call_soon_threadsafe(self._take, load)

        job: ReadJob[Any] = ReadJob(reads, notify)
        remaining = {read.block: read.page for read in reads}
        started_s, wait_s = self._clock(), readers.wait_s(thread)
        load = _Load(
            group, tiers, tier, readers, thread, job, session, remaining, price, behind, started_s, wait_s, release,
            parents or {},
        )  # fmt: skip
        self._open.add(load)
        thread.pending_pages += len(reads)
        ended: Future[None] = Future()
        ended.add_done_callback(lambda each: loop.call_soon_threadsafe(self._ended, load, each))
        thread.start(job, ended)
        self._check_later(load)

    def give_up_unwanted(self) -> None:
        """Gives up the loads none of whose missing pages is held."""
        for load in list(self._open):
            if not self._is_wanted(load):
                self._give_up(load)

    def stop(self) -> None:
        """Gives up all loads, without handing their pages on to other suppliers."""
        for load in list(self._open):
            load.behind = None
            self._give_up(load)

    def _take(self, load: _Load) -> None:
        """Commits the pages that have come, and hands on those that never will."""
        results, lost = load.job.take_results(), []
        if results:
            reach(Point.TIER_LOADED)
        for result in results:
            read, error = result.read, result.error
            page = load.remaining.pop(read.block, None)
            if page is None:
                continue  # given up before
            if error is not None:
                report = load.tiers.damaged_read if isinstance(error, DamagedPage) else load.tiers.missing_read
                report(load.tier, read)
                self._pool.group_of(page).clear_writer(page)
                lost.append(read.block)
                continue
            load.arrived += 1
            group = self._pool.group_of(page)
            if group.is_arriving(page):
                group.fill(page)
                load.tiers.hit(load.tier, read.block_hash)
            else:  # nobody waits for it any more
                group.clear_writer(page)
        self._hand_on(load, lost)
        if results:
            self._wake()
        if not self._is_wanted(load):
            self._give_up(load)

    def _is_wanted(self, load: _Load) -> bool:
        """Returns whether somebody holds a page that has not come, or all have come."""
        return not load.remaining or any(map(self._is_held, load.remaining.values()))

    def _is_held(self, page: PageId) -> bool:
        return self._pool.group_of(page).is_wanted(page)

    def _check_later(self, load: _Load) -> None:
        delay_s = max(LOOK_S, load.price.other_s / 16)
        load.timer = asyncio.get_running_loop().call_later(delay_s, self._check, load)

    def _check(self, load: _Load) -> None:
        """Gives a load up if nobody waits for it, or if its blocks would be computed or pulled sooner."""
        if not self._is_wanted(load):
            self._give_up(load)
            return
        if load.parents:
            self._hand_over(load)
        wanted, elapsed_s = load.arrived + len(load.remaining), self._clock() - load.started_s
        if is_late(elapsed_s, load.wait_s, load.arrived, wanted, load.price.other_s):
            load.tiers.metrics.given_up(load.tier)
            load.readers.took_at_least(_alone_s(load, elapsed_s - load.wait_s), load.arrived + 1)
            self._give_up(load)
        else:
            self._check_later(load)

    def _hand_over(self, load: _Load) -> None:
        """Leaves blocks to computing if that has reached a load from the end: both share the blocks between them."""
        blocks = sorted(load.remaining)
        if not blocks or self._pool.find(load.parents[blocks[0]]) is None:
            return
        page_time, beside = load.readers.page_time, load.readers.beside(load.thread)
        count = self._prices.to_compute(blocks, lambda pages: page_time.reading_s(pages, beside))
        if not count:
            return
        load.job.leave_out(blocks[:count])
        for block in blocks[:count]:
            self._pool.clear_writer(load.remaining.pop(block))
        self._wake()

    def _give_up(self, load: _Load) -> None:
        """Lets others write what has not come."""
        load.job.give_up()
        remaining, load.remaining = load.remaining, {}
        if load.timer is not None:
            load.timer.cancel()
        for page in remaining.values():
            self._pool.group_of(page).clear_writer(page)
        self._hand_on(load, list(remaining))
        self._wake()

    def _hand_on(self, load: _Load, blocks: list[int]) -> None:
        """Hands on what a load does not bring."""
        if blocks and load.behind is not None:
            load.behind.take_over([Part(block, load.group) for block in blocks])

    def _give_up_tier(self, group: GroupKind, tier: Tier) -> None:
        for load in list(self._open):
            if load.group is group and load.tier is tier:
                self._give_up(load)

    def _ended(self, load: _Load, ended: Future[None]) -> None:
        """Ends a load whose reader is done. The load may have been given up long before."""
        self._take(load)
        self._open.discard(load)
        load.thread.pending_pages -= len(load.job.reads)
        load.ended()
        wanted, elapsed_s = len(load.job.reads), self._clock() - load.started_s
        if not load.job.is_given_up:
            load.readers.took(load.job.times)
        error = ended.exception()
        if error is not None:
            load.tiers.failed(load.tier, error)
        self._give_up(load)
        load.tiers.metrics.loaded(load.tier, load.arrived, elapsed_s, load.price.compute_s * load.arrived / wanted)


def _alone_s(load: _Load, reading_s: float) -> float:
    """Returns the least time that the reads of a load would have taken without those of another thread."""
    is_beside = load.readers.beside(load.thread) > 0
    return reading_s / load.readers.page_time.slowdown if is_beside else reading_s


def reads_from(
    tiers: PageTiers, tier: Tier, hashes: Sequence[BlockHash] | Mapping[int, BlockHash], pages: Mapping[int, PageId]
) -> list[PageRead[Any]]:
    """Returns a read for each of these blocks that a tier holds, into the block's page."""
    reads: list[PageRead[Any]] = []
    for block, page in pages.items():
        place = tiers.place(tier, hashes[block])
        if place is not None:
            reads.append(PageRead(block, hashes[block], page, place))
    return reads
