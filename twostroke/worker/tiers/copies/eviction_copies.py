"""Copies of blocks that a claim is about to evict, made on a thread before the claim takes their pages.

A long prompt evicts thousands of pages at once, and copying them on the event loop would stop every stream. Such a
claim waits, for a bounded time, until what it would evict is on a lower tier: the blocks stay cached and readable
meanwhile. Nobody holds them: a copy counts only if its page has the same block and generation before and after. Where
time or room is too short, the blocks that a chain begins with are kept: the others are worth nothing without them.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from twostroke.base.ids import BlockHash, PageId, SessionId
from twostroke.kv_cache.groups.full_group import CachedBlock
from twostroke.kv_cache.memory import PageAccess, Pages
from twostroke.kv_cache.pool import BlockPool
from twostroke.transfer.base import digest
from twostroke.worker.condition import Condition
from twostroke.worker.tiers.copies.copy_target import CopyTarget
from twostroke.worker.tiers.copies.offload import Offload
from twostroke.worker.tiers.copies.turn_copies import TURN_BYTES

log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
"""Bytes that are copied between two checks of what is still wanted: some milliseconds."""
LONGEST_WAIT_S = 1.0
"""Longest time that a claim waits for copies. Memory copies several GB in it; a prompt that needs them takes longer."""


@dataclass(frozen=True, slots=True)
class _PageCopy:
    """One page on its way to a lower tier."""

    block_hash: BlockHash
    page: PageId
    generation: int
    """Generation of the page when it held the block."""
    target: CopyTarget


@dataclass(slots=True, eq=False)
class _CopyJob:
    """The blocks that one claim would evict."""

    hashes: Sequence[BlockHash]
    """Blocks of the claim itself."""
    shortage: int
    left: deque[CachedBlock] | None = None
    """Blocks that are still to be copied, the first ones of each chain first. None before its turn."""
    is_done: bool = False
    """Whether nothing is copied any more: the claim may be made."""
    has_copied: bool = False


class EvictionCopies:
    """The `ClaimGate` of a worker. One owner, one thread: the worker's event loop."""

    def __init__(
        self,
        offload: Offload,
        pool: BlockPool,
        memory: Pages,
        wake: Callable[[], None],
        loaded_depth: Callable[[Sequence[BlockHash]], int],
    ) -> None:
        """`wake` is called when claims that had to wait can be made; for `loaded_depth` see `ClaimGate`."""
        self._offload = offload
        self._pool = pool
        self._memory = memory
        self._wake = wake
        self._loaded_depth = loaded_depth
        self._jobs: dict[SessionId, _CopyJob] = {}
        """Jobs of claims that were not made yet."""
        self._waiting: deque[_CopyJob] = deque()
        """Jobs with blocks to copy; the first one has a batch under way."""
        self._progress = Condition()
        self._is_stopped = False

    def may_claim(self, session: SessionId, hashes: Sequence[BlockHash], private: int) -> bool:
        """Returns False while blocks that this claim would evict are being copied, at most `LONGEST_WAIT_S` long."""
        if not self._offload.is_used:
            return True
        job = self._jobs.get(session) or self._begin(session, hashes, private)
        if job is None:
            return True
        if not job.is_done:
            return False
        del self._jobs[session]
        if job.has_copied:
            self._offload.end_turn()  # blocks that were not copied must not replace those that were
        return True

    def loaded_depth(self, hashes: Sequence[BlockHash]) -> int:
        return self._loaded_depth(hashes)

    async def ready(self, session: SessionId, hashes: Sequence[BlockHash], private: int) -> None:
        """Waits until a claim may be made."""
        while not self.may_claim(session, hashes, private):
            await self._progress.ticket().wait()

    def stop(self) -> None:
        """Makes no more copies, and lets all waiting claims go ahead."""
        self._is_stopped = True
        for job in list(self._waiting):
            self._finish(job)

    def _begin(self, session: SessionId, hashes: Sequence[BlockHash], private: int) -> _CopyJob | None:
        """Lets a claim wait for its copies; returns None if it would evict little or nothing, or cannot be made."""
        shortage = self._pool.shortage(hashes, private)
        if shortage is None or not self._is_much(shortage) or self._is_stopped:
            return None
        job = self._jobs[session] = _CopyJob(hashes, shortage)
        asyncio.get_running_loop().call_later(LONGEST_WAIT_S, self._expire, session, job)
        self._waiting.append(job)
        if len(self._waiting) == 1:
            self._go_on()
        return job

    def _is_much(self, blocks: int) -> bool:
        """Returns whether this many blocks are more than are copied on the event loop in one turn."""
        return blocks * self._memory.page_bytes > TURN_BYTES

    def _begin_turn(self, job: _CopyJob) -> None:
        """Chooses what to copy: nothing where so little is left that the claim itself may copy it."""
        left = self._uncopied(job.hashes, job.shortage)
        job.left, job.has_copied = (left, True) if self._is_much(len(left)) else (deque(), False)

    def _uncopied(self, hashes: Sequence[BlockHash], shortage: int) -> deque[CachedBlock]:
        """Returns the blocks to copy, of each chain the first ones first. O(pages).

        A block is released before those that come before it in its chain, so it is evicted before them.
        """
        own = set(hashes)
        candidates = (
            block for block in self._pool.cached() if block.hash not in own and not self._pool.is_pinned(block.hash)
        )
        victims = heapq.nsmallest(shortage, candidates, key=lambda block: block.last_used)
        victims.reverse()
        kept_first = victims[: self._offload.most_copies]
        return deque(block for block in kept_first if not self._offload.keeps(block.hash))

    # Copying

    def _go_on(self) -> None:
        """Copies the next batch of the first job that has blocks left."""
        waiting = self._waiting
        while waiting and not self._is_stopped:
            job = waiting[0]
            if job.left is None and not job.is_done:
                self._begin_turn(job)
            copies = self._next_batch(job)
            if copies:
                copied = Future[list[bytes | None]]()
                copied.add_done_callback(partial(self._copied, asyncio.get_running_loop(), job, copies))
                self._offload.copy_off_loop(partial(_copy, copies, self._memory), copied)
                return
            waiting.popleft()
            self._finish(job)

    def _next_batch(self, job: _CopyJob) -> list[_PageCopy]:
        copies: list[_PageCopy] = []
        while job.left and len(copies) * self._memory.page_bytes < BATCH_BYTES:
            block = job.left.popleft()
            page = self._pool.find(block.hash)
            if page is None or self._offload.keeps(block.hash):
                continue
            target = self._offload.target(block.hash, block.parent)
            if target is None:  # no room: what follows is worth less
                job.left.clear()
                break
            copies.append(_PageCopy(block.hash, page, self._memory.generation(page), target))
        return copies

    def _copied(
        self,
        loop: asyncio.AbstractEventLoop,
        job: _CopyJob,
        copies: Sequence[_PageCopy],
        copied: Future[list[bytes | None]],
    ) -> None:
        """Has the copies taken on the event loop. It is called on the copying thread."""
        loop.call_soon_threadsafe(self._take, job, copies, copied)

    def _take(self, job: _CopyJob, copies: Sequence[_PageCopy], copied: Future[list[bytes | None]]) -> None:
        """Keeps the copies of pages that have not changed."""
        error = copied.exception()
        if error is not None:
            log.warning("evicted blocks not copied error=%s: %s", type(error).__name__, error)
            job.left = deque()
        digests = copied.result() if error is None else [None] * len(copies)
        for copy, known in zip(copies, digests, strict=True):
            if known is not None and not self._is_stopped and self._is_unchanged(copy):
                copy.target.commit(known)
            else:
                copy.target.cancel()
        self._go_on()

    def _is_unchanged(self, copy: _PageCopy) -> bool:
        has_block = self._pool.find(copy.block_hash) == copy.page
        return has_block and self._memory.generation(copy.page) == copy.generation

    def _finish(self, job: _CopyJob) -> None:
        job.left, job.is_done = deque(), True
        self._progress.notify()
        self._wake()

    def _expire(self, session: SessionId, job: _CopyJob) -> None:
        """Lets a claim go ahead that has waited long enough, and forgets one that is never made."""
        if not job.is_done:
            left = job.shortage if job.left is None else len(job.left)
            log.warning("claim does not wait for copies left=%d seconds=%.1f", left, LONGEST_WAIT_S)
            self._finish(job)
            asyncio.get_running_loop().call_later(LONGEST_WAIT_S, self._expire, session, job)
        elif self._jobs.get(session) is job:
            del self._jobs[session]


def _copy(copies: Iterable[_PageCopy], memory: Pages, access: PageAccess) -> list[bytes | None]:
    """Copies pages on the thread of the access; returns their digests, None for one that was reused meanwhile."""
    digests: list[bytes | None] = []
    for copy in copies:
        known = None
        if memory.generation(copy.page) == copy.generation:
            (data,) = next(access.read([[copy.page]]))
            np.copyto(copy.target.data, np.frombuffer(data, np.uint8))
            known = digest(copy.target.data)
        digests.append(known if memory.generation(copy.page) == copy.generation else None)
    return digests
