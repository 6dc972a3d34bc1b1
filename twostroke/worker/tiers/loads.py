"""Loads bring missing blocks up from the lower tiers: read on threads, verified, then readable like computed ones.

A load is begun where it is predicted to take less time than computing its blocks, and than the pull that a router
ordered for them. It is given up where the better one of these would have been done sooner, or where nobody waits for it
any more. Its pages have it as their writer meanwhile, so one load serves all sequences that wait. What does not come is
pulled where a pull was ordered, and computed elsewhere.

Attention needs all blocks before a block, so computing goes forward. Where loading all takes about as long as computing
all, a load brings the last blocks, the last one first, while the first ones are computed, until they meet.

A load for another worker takes pages that no sequence here asked for, so loads for others are begun only while those
under way keep few pages.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.fault_points import Point, reach
from twostroke.ids import BlockHash, PageId, SessionId
from twostroke.kv_cache.block import root_hash
from twostroke.kv_cache.parts import group_of
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.tier import Tier
from twostroke.scheduler.cost import Queued
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.scheduler.values import AdmittedSequence
from twostroke.worker.pulls.ordered_pull import OrderedPull
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.price import (
    Price,
    blocks_to_compute,
    is_late,
    pays,
    pays_in_part,
    queued_blocks,
)
from twostroke.worker.tiers.reader import DamagedPage, PageRead, ReaderThread, ReadJob
from twostroke.worker.tiers.slow_disk import SlowDisk
from twostroke.worker.tiers.window_loads import LOWER_TIERS, WindowLoads

log = logging.getLogger(__name__)

LOOK_S = 0.005
"""Least time between two looks at whether a load is late."""
POOL_PART = 8
"""A load for another worker is begun while the loads of its tier keep less than the pool's pages divided by this."""


@dataclass(slots=True, eq=False)
class _Load:
    tiers: PageTiers
    """The tiers of the pages, or of the window parts, that it brings."""
    tier: Tier
    thread: ReaderThread[Any]
    job: ReadJob[Any]
    session: SessionId
    remaining: dict[int, PageId]
    """Pages that have not come, by their index in the load."""
    price: Price
    pull: OrderedPull | None
    started_s: float
    wait_s: float
    """Predicted time until its first page is read."""
    ended: Callable[[], None]
    parents: Mapping[int, BlockHash]
    """Parents of its blocks if it reads the last one first while those before the first are computed; else empty."""
    arrived: int = 0
    timer: asyncio.TimerHandle | None = field(default=None)


class TierLoads:
    """Loads of one epoch of a worker. One owner, one thread: the event loop."""

    def __init__(
        self,
        tiers: PageTiers,
        pool: BlockPool,
        block_size: int,
        *,
        window_tiers: PageTiers | None = None,
        new_session: Callable[[], SessionId],
        compute_s: Callable[[Queued], float],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compute_s` predicts how long work that came now would be computed; `wake` is called as pages arrive.

        `window_tiers`: those of window parts, where these lie apart from pages.
        """
        self._tiers = tiers
        self._pool = pool
        self._block_size = block_size
        self._new_session = new_session
        self._compute_s = compute_s
        self._wake = wake
        self._clock = clock
        self._open: set[_Load] = set()
        self._slow_disk = SlowDisk(tiers, clock)
        self._windows: WindowLoads | None = None
        if window_tiers is not None and pool.windows is not None:
            self._windows = WindowLoads(tiers, window_tiers, pool, pool.windows)
            window_tiers.when_turned_off(functools.partial(self._give_up_tier, window_tiers))
        tiers.when_turned_off(functools.partial(self._give_up_tier, tiers))

    @property
    def open(self) -> int:
        """Loads that have not ended."""
        return len(self._open)

    def depth(self, hashes: Sequence[BlockHash]) -> int:
        """Return after how many of these blocks a sequence can go on once what pays is loaded; 0 if nothing is.

        Where pages hold what all layers keep it is 0: then loads may end anywhere.
        """
        return 0 if self._windows is None else self._windows.depth(hashes, self._pays_to_reach)

    def reach(self, sequence: KnownSequence) -> int:
        """Return after how many blocks of a waiting sequence nothing is loaded for it."""
        hashes = sequence.block_hashes
        return len(hashes) if self._windows is None else max(sequence.pulled_blocks, self.depth(hashes))

    def admitting(self, admission: AdmittedSequence, pull: OrderedPull | None) -> AdmittedSequence:
        """Begin to load missing blocks of an admitted sequence; return the admission without those.

        `pull` is what its router ordered: it brings what is left, and what a load does not bring.
        """
        sequence, missing, parts = admission.sequence, admission.missing, admission.missing_windows
        self._note_reuse(sequence)
        left = reached = missing if self._windows is None else self._windows.reached(sequence, missing)
        for tier in LOWER_TIERS:
            if left and tier in self._tiers.used:
                left = self._without_loaded(tier, sequence, left, pull)
        if self._windows is not None and parts and (pull is not None or len(left) < len(reached) or not reached):
            parts = self._without_loaded_parts(self._windows, sequence, parts, pull)
        return replace(admission, missing=[*left, *missing[len(reached) :]], missing_windows=parts)

    def share(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> dict[int, PageId]:
        """Claim pages for blocks that another worker asks for, as far as lower tiers hold these, and load them.

        Returns the pages; the caller releases them and then calls `give_up_unwanted`. A page without a writer did not
        come.
        """
        held = [block for block in blocks if self._tiers.holds(hashes[block])]
        claimed, _ = self._claim(hashes, [block for block in held if self._pool.is_coming(hashes[block])])
        for tier in LOWER_TIERS:
            missing = [block for block in held if block not in claimed]
            if missing and tier in self._tiers.used:
                claimed |= self._share_from(tier, hashes, missing)
        return claimed

    def share_parts(self, hashes: Mapping[int, BlockHash]) -> dict[int, PageId]:
        """Hold window parts that another worker asks for and that are coming or lie on tiers; load these.

        The caller holds the pages of the blocks. It releases the parts (`WindowParts.unshare`), and then calls
        `give_up_unwanted`. A part without a writer did not come.
        """
        if self._windows is None:
            return {}
        held = self._windows.share(hashes)
        for tier in LOWER_TIERS:
            slots = self._windows.unwritten(held)
            reads = self._windows.reads(tier, {block: hashes[block] for block in slots}, slots)
            compute_s = self._compute_s(queued_blocks(slots, self._block_size))
            self._start(self._windows.tiers, tier, reads, Price(compute_s, compute_s), None)
        return held

    def thread_for(self, tier: Tier, pages: int) -> ReaderThread[Any]:
        """Return the thread of a tier that is to read so many pages, if they are asked for now."""
        return self._tiers.readers(tier).thread_for(pages, self._tiers.page_time(tier), self._clock())

    def fetch(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> dict[int, PageId]:
        """Claim pages for blocks that the disk holds and that are not here, and load them; the caller releases them."""
        claimed, missing = self._claim(hashes, blocks)
        compute_s = self._compute_s(queued_blocks(missing, self._block_size))
        reads = self._reads(Tier.DISK, hashes, missing, claimed)
        self._start(self._tiers, Tier.DISK, reads, Price(compute_s, compute_s), None)
        return claimed

    def give_up_unwanted(self) -> None:
        """Give up the loads of whose pages nobody holds any."""
        for load in list(self._open):
            if not self._is_wanted(load):
                self._give_up(load)

    def stop(self) -> None:
        """Give up all loads; nothing is pulled instead."""
        for load in list(self._open):
            load.pull = None
            self._give_up(load)

    # Sharing

    def _share_from(self, tier: Tier, hashes: Sequence[BlockHash], missing: Sequence[int]) -> dict[int, PageId]:
        """Claim and load what this tier holds, as far as there is room and it pays; return the pages."""
        held = [block for block in missing if self._tiers.place(tier, hashes[block]) is not None]
        held = held[: self._room(tier)]
        price = self._price(tier, hashes, held, None) if held else None
        if price is None:
            return {}
        claimed, to_load = self._claim(hashes, held)
        reads = self._reads(tier, hashes, to_load, claimed)
        self._start(self._tiers, tier, reads, price.of_part(len(to_load), len(held)), None)
        return claimed

    def _room(self, tier: Tier) -> int:
        """Return how many more pages loads for other workers may take."""
        kept = sum(len(load.remaining) for load in self._open if load.tiers is self._tiers and load.tier is tier)
        return max(0, max(1, self._pool.total // POOL_PART) - kept)

    def _claim(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> tuple[dict[int, PageId], list[int]]:
        """Hold pages for these blocks until there are no more; return them, and the blocks that were not there."""
        claimed: dict[int, PageId] = {}
        missing: list[int] = []
        for block in blocks:
            root = hashes[block - 1] if block else root_hash()
            claim = self._pool.claim([hashes[block]], root, 0, first=block)
            if claim is None:
                break
            claimed[block] = claim.pages[0]
            missing += [block] if claim.missing else []
        return claimed, missing

    # Choosing

    def _note_reuse(self, sequence: KnownSequence) -> None:
        """Tell the tiers which blocks the sequence found in the pool."""
        if Tier.DISK not in self._tiers.used or sequence.preemptions:
            return
        for block in range(sequence.hit_blocks):
            self._tiers.reused(sequence.pages[block], sequence.block_hashes[block], sequence.parent_of(block))
        if self._windows is not None:
            self._windows.note_reuse(sequence)

    def _pays_to_reach(self, tier: Tier, blocks: range, unread: Sequence[BlockHash]) -> bool:
        """Tell whether blocks after which a sequence could go on are loaded from a tier, all or the last ones.

        `unread`: those whose pages have to be read from this tier.
        """
        load_s, compute_s = self._load_s(tier, len(unread)), self._compute_s(queued_blocks(blocks, self._block_size))
        if pays(load_s, compute_s) or pays_in_part(load_s, compute_s, is_alone=not self._pool.unwritten.blocks):
            return True
        if tier is Tier.DISK and unread:
            self._slow_disk.refused(unread[0], len(unread), compute_s)
        return False

    def _without_loaded_parts(
        self, windows: WindowLoads, sequence: KnownSequence, blocks: Sequence[int], pull: OrderedPull | None
    ) -> tuple[int, ...]:
        """Load the window parts of these blocks that lie on tiers, unless they are pulled sooner; return the others."""
        spared_s = self._compute_s(queued_blocks(windows.spared_blocks(sequence), self._block_size))
        other_s = spared_s if pull is None else min(spared_s, pull.expected.arrival_s(blocks))
        left = {block: sequence.block_hashes[block] for block in blocks}
        for tier, reads in windows.reads_of(sequence, left):
            if pull is None or pays(len(reads) * windows.tiers.page_time(tier).seconds, other_s):
                loaded = [read.block for read in reads]
                compute_s = self._compute_s(queued_blocks(loaded, self._block_size))
                self._start(windows.tiers, tier, reads, Price(compute_s, other_s), pull)
                left = {block: left[block] for block in left if block not in loaded}
        return tuple(left)

    def _without_loaded(
        self, tier: Tier, sequence: KnownSequence, missing: list[int], pull: OrderedPull | None
    ) -> list[int]:
        """Load what this tier holds of the missing blocks if that pays; return the others."""
        hashes = sequence.block_hashes
        held = [block for block in missing if self._tiers.place(tier, hashes[block]) is not None]
        self._tiers.metrics.looked_up(tier, len(held), len(missing) - len(held))
        if not held:
            return missing
        if pull is None and held[0] == missing[0] and (begun := self._load_from_end(tier, sequence, held, missing)):
            return [block for block in missing if block not in begun]
        chosen: list[int] = []
        price: Price | None = None
        for part in [held] if pull is None else pull.parts(held):
            priced = self._price(tier, hashes, [*chosen, *part], pull)
            if priced is not None:
                chosen, price = [*chosen, *part], priced
        if price is not None:
            pages = {block: sequence.pages[block] for block in chosen}
            self._start(self._tiers, tier, self._reads(tier, hashes, chosen, pages), price, pull)
        loading = set(chosen)
        return [block for block in missing if block not in loading]

    def _load_from_end(
        self, tier: Tier, sequence: KnownSequence, held: list[int], missing: list[int]
    ) -> frozenset[int]:
        """Load the last ones of these blocks, the last one first, where the others are computed meanwhile.

        Returns those that are loaded: none where loading or computing all of them is nearly as good.
        """
        compute_s = self._compute_s(queued_blocks(held, self._block_size))
        is_alone = self._pool.unwritten.blocks <= len(missing)
        if not pays_in_part(self._load_s(tier, len(held)), compute_s, is_alone=is_alone):
            return frozenset()
        last = held[self._first_to_load(tier, held) :]
        pages = {block: sequence.pages[block] for block in last}
        reads = self._reads(tier, sequence.block_hashes, last, pages)[::-1]
        parents = {block: sequence.parent_of(block) for block in last}
        self._start(self._tiers, tier, reads, Price(compute_s * len(last) / len(held), compute_s), None, parents)
        return frozenset(last)

    def _first_to_load(self, tier: Tier, blocks: Sequence[int]) -> int:
        """Return how many of the blocks are to be computed before a load of the others has come as far."""
        return blocks_to_compute(
            len(blocks),
            lambda count: self._load_s(tier, count),
            lambda count: self._compute_s(queued_blocks(blocks[:count], self._block_size)),
        )

    def _price(
        self, tier: Tier, hashes: Sequence[BlockHash], held: Sequence[int], pull: OrderedPull | None
    ) -> Price | None:
        """Predict how long these blocks take without the tier; return None where a load would take longer."""
        compute_s = self._compute_s(queued_blocks(held, self._block_size))
        price = Price(compute_s, compute_s if pull is None else min(compute_s, pull.expected.arrival_s(held)))
        if pays(self._load_s(tier, len(held)), price.other_s):
            return price
        self._tiers.metrics.refused(tier)
        if tier is Tier.DISK:
            self._slow_disk.refused(hashes[held[0]], len(held), compute_s)
        return None

    def _load_s(self, tier: Tier, pages: int) -> float:
        """Predict how long so many pages take, with those that wait before them and those that are read beside them."""
        return self._tiers.readers(tier).load_s(pages, self._tiers.page_time(tier), self._clock())

    def _beside(self, load: _Load) -> int:
        """Return the pages that another thread has to read."""
        return load.tiers.readers(load.tier).beside(load.thread)

    def _alone_s(self, load: _Load, reading_s: float) -> float:
        """Return the least time that the reads of a load would have taken without those of another thread."""
        return reading_s / load.tiers.page_time(load.tier).slowdown if self._beside(load) else reading_s

    # Loading

    def _reads(
        self, tier: Tier, hashes: Sequence[BlockHash], blocks: Sequence[int], pages: dict[int, PageId]
    ) -> list[PageRead[Any]]:
        """Return the reads of those of the blocks that the tier holds."""
        reads: list[PageRead[Any]] = []
        for block in blocks:
            place = self._tiers.place(tier, hashes[block])
            if place is not None:
                reads.append(PageRead(block, hashes[block], pages[block], place))
        return reads

    def _start(
        self,
        tiers: PageTiers,
        tier: Tier,
        reads: list[PageRead[Any]],
        price: Price,
        pull: OrderedPull | None,
        parents: Mapping[int, BlockHash] | None = None,
    ) -> None:
        """Begin a load; with `parents` of its blocks, computing may take over its first ones."""
        if not reads:
            return
        session, loop, page_time = self._new_session(), asyncio.get_running_loop(), tiers.page_time(tier)
        thread = tiers.readers(tier).thread_for(len(reads), page_time, self._clock())
        for read in reads:
            group_of(self._pool, read.page).assign_writer(read.page, session)
        reach(Point.TIER_LOADING)
        release = tiers.hold(tier, [read.place for read in reads])

        def notify() -> None:
            loop.call_soon_threadsafe(self._take, load)

        job: ReadJob[Any] = ReadJob(reads, notify)
        remaining = {read.block: read.page for read in reads}
        started_s, wait_s = self._clock(), tiers.readers(tier).wait_s(thread, page_time, self._clock())
        load = _Load(
            tiers, tier, thread, job, session, remaining, price, pull, started_s, wait_s, release, parents or {}
        )
        self._open.add(load)
        thread.pending_pages += len(reads)
        ended: Future[None] = Future()
        ended.add_done_callback(lambda each: loop.call_soon_threadsafe(self._ended, load, each))
        thread.start(job, ended)
        self._look_later(load)

    def _take(self, load: _Load) -> None:
        """Commit the pages that have come; pull those that never will where a pull was ordered."""
        results, lost = load.job.take_results(), []
        if results:
            reach(Point.TIER_LOADED)
        for result in results:
            read, error = result.read, result.error
            page = load.remaining.pop(read.block, None)
            if page is None:
                continue  # given up before
            if error is not None:
                told = load.tiers.damaged_read if isinstance(error, DamagedPage) else load.tiers.missing_read
                told(load.tier, read)
                group_of(self._pool, page).clear_writer(page)
                lost.append(read.block)
                continue
            load.arrived += 1
            group = group_of(self._pool, page)
            if group.is_arriving(page):
                group.fill(page)
                load.tiers.hit(load.tier, read.block_hash)
            else:  # nobody waits for it any more
                group.clear_writer(page)
        self._pull_instead(load, lost)
        if results:
            self._wake()
        if not self._is_wanted(load):
            self._give_up(load)

    def _is_wanted(self, load: _Load) -> bool:
        """Tell whether somebody holds a page that has not come, or all have come."""
        return not load.remaining or any(map(self._is_held, load.remaining.values()))

    def _is_held(self, page: PageId) -> bool:
        return group_of(self._pool, page).is_wanted(page)

    def _look_later(self, load: _Load) -> None:
        delay_s = max(LOOK_S, load.price.other_s / 16)
        load.timer = asyncio.get_running_loop().call_later(delay_s, self._look, load)

    def _look(self, load: _Load) -> None:
        """Give a load up if nobody waits for it, or if its blocks would be computed or pulled sooner."""
        if not self._is_wanted(load):
            self._give_up(load)
            return
        if load.parents:
            self._hand_over(load)
        wanted, elapsed_s = load.arrived + len(load.remaining), self._clock() - load.started_s
        if is_late(elapsed_s, load.wait_s, load.arrived, wanted, load.price.other_s):
            self._tiers.metrics.given_up(load.tier)
            load.tiers.took_at_least(load.tier, self._alone_s(load, elapsed_s - load.wait_s), load.arrived + 1)
            self._give_up(load)
        else:
            self._look_later(load)

    def _hand_over(self, load: _Load) -> None:
        """Let computing go on where it has reached a load that comes from the end: they share what is between them."""
        blocks = sorted(load.remaining)
        if not blocks or self._pool.find(load.parents[blocks[0]]) is None:
            return
        page_time, beside = load.tiers.page_time(load.tier), self._beside(load)
        count = blocks_to_compute(
            len(blocks),
            lambda count: page_time.reading_s(count, beside),
            lambda count: self._compute_s(queued_blocks(blocks[:count], self._block_size)),
        )
        if not count:
            return
        load.job.leave_out(blocks[:count])
        for block in blocks[:count]:
            self._pool.clear_writer(load.remaining.pop(block))
        self._wake()

    def _give_up(self, load: _Load) -> None:
        """Let others write what has not come."""
        load.job.give_up()
        remaining, load.remaining = load.remaining, {}
        if load.timer is not None:
            load.timer.cancel()
        for page in remaining.values():
            group_of(self._pool, page).clear_writer(page)
        self._pull_instead(load, list(remaining))
        self._wake()

    def _pull_instead(self, load: _Load, blocks: list[int]) -> None:
        """Pull what a load does not bring, where that was ordered."""
        if blocks and load.pull is not None:
            begin = load.pull.begin if load.tiers is self._tiers else load.pull.begin_windows
            begin(blocks)

    def _give_up_tier(self, tiers: PageTiers, tier: Tier) -> None:
        for load in list(self._open):
            if load.tiers is tiers and load.tier is tier:
                self._give_up(load)

    def _ended(self, load: _Load, ended: Future[None]) -> None:
        """The reader is done with a load, which may have been given up long before."""
        self._take(load)
        self._open.discard(load)
        load.thread.pending_pages -= len(load.job.reads)
        load.ended()
        wanted, elapsed_s = len(load.job.reads), self._clock() - load.started_s
        if not load.job.is_given_up:
            load.tiers.took(load.tier, load.job.times)
        error = ended.exception()
        if error is not None:
            load.tiers.turn_off(load.tier, f"{type(error).__name__}: {error}")
        self._give_up(load)
        self._tiers.metrics.loaded(load.tier, load.arrived, elapsed_s, load.price.compute_s * load.arrived / wanted)
