"""Prefetch brings blocks of sequences that wait for admission from disk closer to the pool, a few pages at a time.

With a host tier they go to host memory, where a load takes a fraction of the time. Without one, those of the first
waiting sequence go to pages that are free without an eviction. The disk's threads prefetch only while no load waits
for them. What a waiting sequence has in host memory is held, so that evictions for others do not take it. All of that
ends when the sequence is admitted or has ended.

Waiting sequences are served in the order of the queue: blocks are read for the first one that has some to read.
Sequences get their holds when they come among those that admission looks at, while there is room. A sequence costs a
look at each of its own blocks, once. A step costs a look at the few sequences that admission looks at, and at no block
of theirs. Loads go first: prefetch begins a read of a few pages only while the disk has nothing else to read, its own
earlier read included. So loads never wait for more than those pages, however many sequences wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.tier import Tier
from twostroke.scheduler.cost import Queued
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.worker.tiers.host_tier import HostTier
from twostroke.worker.tiers.loads.tier_loads import TierLoads
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.price import pays, queued_blocks
from twostroke.worker.tiers.reader import PageRead, ReaderThread, ReadJob

READ_PAGES = 4
"""Pages that are read together: a load that comes meanwhile reads beside at most this many."""
HELD_SHARE = 0.75
"""Fraction of the host tier's pages that waiting sequences may hold: evictions need the others."""


@dataclass(slots=True, eq=False)
class _Waiting:
    sequence: KnownSequence
    releases: list[Callable[[], None]]
    """Ends of its holds in host memory, one for each."""
    left: list[int]
    """The prompt's blocks that are on disk alone and that prefetch has not read, in descending order."""


@dataclass(slots=True, eq=False)
class _HostRead:
    """Pages on their way from disk to host memory."""

    host: HostTier
    waiting: _Waiting
    job: ReadJob[Any]
    thread: ReaderThread[Any]
    pages: dict[BlockHash, PageId]
    """Pages of the host tier that have not been filled."""


class Prefetch:
    """Prefetches for one worker. One owner, one thread: the event loop."""

    def __init__(
        self,
        tiers: PageTiers,
        pool: BlockPool,
        loads: TierLoads,
        block_size: int,
        *,
        compute_s: Callable[[Queued], float],
        wake: Callable[[], None],
    ) -> None:
        """`compute_s` predicts how long work would be computed; `wake` is called where there may be more to read."""
        self._tiers = tiers
        self._pool = pool
        self._loads = loads
        self._block_size = block_size
        self._compute_s = compute_s
        self._wake = wake
        self._waiting: dict[KnownSequence, _Waiting] = {}
        self._first: list[_Waiting] = []
        """Waiting sequences in the order of the queue."""
        self.held = 0
        """Entries of the host tier that waiting sequences hold."""
        self._read: _HostRead | None = None
        self._claimed: list[PageId] = []
        """Pages of the pool that are being filled for the first waiting sequence."""

    @property
    def admits_beside_steps(self) -> bool:
        """Whether nothing is loaded. A load that begins amid a step is weighed against a wait that soon is over: in
        simulation, with a disk slower than computing, the p90 of first tokens was a tenth longer."""
        return not self._tiers.used

    def begin_admission(self, waiting: Sequence[KnownSequence]) -> None:
        """Holds what host memory has of the sequences that may be admitted now, and forgets those that are gone."""
        if not self._tiers.used:
            return
        for gone in self._waiting.keys() - set(waiting):
            self._forget(self._waiting.pop(gone))
        for sequence in waiting:
            if sequence not in self._waiting:
                self._waiting[sequence] = self._hold(sequence)
        self._first = [self._waiting[sequence] for sequence in waiting]

    def end_admission(self, running: int) -> None:
        """Reads more for those that still wait; `running` sequences may each need a page for the next step."""
        self._release_claimed(running)
        if Tier.DISK not in self._tiers.used or self._tiers.readers(Tier.DISK).pending_pages:
            return
        host = self._tiers.host
        waiting = [each for each in self._first if not each.sequence.pages and not each.sequence.ended]
        room = self._pool.count(PageState.FREE) - running if host is None else self._host_room()
        for each in waiting[:1] if host is None else waiting:
            blocks = self._next_blocks(each, min(READ_PAGES, room))
            if blocks and host is not None:
                self._read_to_host(host, each, blocks)
            elif blocks:
                self._read_to_pool(each, blocks)
            if blocks:
                return

    def stop(self) -> None:
        """Gives up everything and holds nothing."""
        for waiting in self._waiting.values():
            self._forget(waiting)
        self._waiting, self._first = {}, []
        self._give_claimed_back()

    # Waiting sequences

    def _hold(self, sequence: KnownSequence) -> _Waiting:
        waiting = _Waiting(sequence, [], [])
        hashes = sequence.block_hashes[: self._loads.for_sequences.reach(sequence)]
        missing = [block for block, each in enumerate(hashes) if self._pool.find(each) is None]
        for block in missing:
            self._hold_in_host(waiting, sequence.block_hashes[block])
        waiting.left = [block for block in reversed(missing) if self._is_on_disk_alone(sequence.block_hashes[block])]
        if not self._pays(waiting.left):
            waiting.left = []
        return waiting

    def _hold_in_host(self, waiting: _Waiting, block_hash: BlockHash) -> None:
        host = self._tiers.host
        entry = None if host is None else host.find(block_hash)
        if host is not None and entry is not None and self._host_room():
            host.hit(block_hash)
            waiting.releases.append(host.hold([entry]))
            self.held += 1

    def _host_room(self) -> int:
        """Returns how many more entries of the host tier may be held."""
        host = self._tiers.host
        return 0 if host is None else max(0, int(host.room * HELD_SHARE) - self.held)

    def _is_on_disk_alone(self, block_hash: BlockHash) -> bool:
        is_here = self._pool.find(block_hash) is not None or self._pool.is_coming(block_hash)
        tiers = self._tiers
        return not is_here and tiers.place(Tier.HOST, block_hash) is None and self._is_on_disk(block_hash)

    def _is_on_disk(self, block_hash: BlockHash) -> bool:
        return self._tiers.place(Tier.DISK, block_hash) is not None

    def _pays(self, blocks: list[int]) -> bool:
        """Returns whether reading these blocks from disk takes less time than computing them."""
        if not blocks:
            return False
        read_s = self._tiers.readers(Tier.DISK).read_s(len(blocks))
        return pays(read_s, self._compute_s(queued_blocks(blocks, self._block_size)))

    def _forget(self, waiting: _Waiting) -> None:
        for release in waiting.releases:
            release()
        self.held -= len(waiting.releases)
        waiting.releases = []
        if self._read is not None and self._read.waiting is waiting:
            self._give_up(self._read)

    # Reading

    def _next_blocks(self, waiting: _Waiting, most: int) -> list[int]:
        """Takes the next blocks to be read for a sequence, at most this many: its first ones that are on disk alone."""
        blocks: list[int] = []
        while waiting.left and len(blocks) < most:
            block = waiting.left.pop()
            if self._is_on_disk_alone(waiting.sequence.block_hashes[block]):
                blocks.append(block)
        return blocks

    def _read_to_pool(self, waiting: _Waiting, blocks: list[int]) -> None:
        """Loads the blocks into pages that are free, and that running sequences will not need in the next step."""
        claimed = self._loads.for_others.fetch(waiting.sequence.block_hashes, blocks)
        self._claimed += claimed.values()
        self._tiers.metrics.prefetched(Tier.DISK, len(claimed))

    def _release_claimed(self, running: int) -> None:
        """Releases pages that have been filled, and all if running sequences may need them for the next step."""
        done = [page for page in self._claimed if self._pool.writer(page) is None]
        self._claimed = [page for page in self._claimed if self._pool.writer(page) is not None]
        self._pool.release(done)
        if self._pool.available < running:
            self._give_claimed_back()

    def _give_claimed_back(self) -> None:
        claimed, self._claimed = self._claimed, []
        if claimed:
            self._pool.release(claimed)
            self._loads.running.give_up_unwanted()

    def _read_to_host(self, host: HostTier, waiting: _Waiting, blocks: list[int]) -> None:
        reads: list[PageRead[Any]] = []
        pages: dict[BlockHash, PageId] = {}
        for block in blocks:
            page = host.take_page()
            if page is None:
                waiting.left = waiting.left if reads else []  # host memory is full of what others hold
                break
            block_hash = waiting.sequence.block_hashes[block]
            place = self._tiers.place(Tier.DISK, block_hash)
            if place is None:  # what the page had held is written there now
                host.give_back(page)
                continue
            pages[block_hash] = page
            reads.append(PageRead(block, block_hash, page, place))
        if not reads:
            return
        loop, thread = asyncio.get_running_loop(), self._tiers.readers(Tier.DISK).thread_for(len(reads))
        job: ReadJob[Any] = ReadJob(reads, lambda: None, host.access)
        read = self._read = _HostRead(host, waiting, job, thread, pages)
        thread.pending_pages += len(reads)
        ended: Future[None] = Future()
        ended.add_done_callback(lambda each: loop.call_soon_threadsafe(self._ended, read, each))
        thread.start(job, ended)

    def _ended(self, read: _HostRead, ended: Future[None]) -> None:
        """Takes the pages of a finished read into host memory, unless the sequence has gone."""
        read.thread.pending_pages -= len(read.job.reads)
        for result in read.job.take_results():
            page = read.pages.pop(result.read.block_hash, None)
            if page is None:
                continue  # given up before
            self._take(read, result.read, page, is_read=result.error is None)
        if not read.job.is_given_up:
            self._tiers.readers(Tier.DISK).took(read.job.times)
        error = ended.exception()
        if error is not None:
            self._tiers.failed(Tier.DISK, error)
        if self._read is read:
            self._give_up(read)
            self._wake()

    def _take(self, host_read: _HostRead, read: PageRead[Any], page: PageId, *, is_read: bool) -> None:
        """Takes one page into host memory. A damaged page is left to the load that will read it, which reports it."""
        host, waiting = host_read.host, host_read.waiting
        if not is_read or not host.promoted(read.block_hash, waiting.sequence.parent_of(read.block), page):
            host.give_back(page)
            return
        self._tiers.metrics.prefetched(Tier.DISK, 1)
        self._hold_in_host(waiting, read.block_hash)

    def _give_up(self, read: _HostRead) -> None:
        read.job.give_up()
        self._read = None
        pages, read.pages = read.pages, {}
        for page in pages.values():
            read.host.give_back(page)
