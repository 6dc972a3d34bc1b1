"""Window loads bring window parts up from the lower tiers, and say where loads of pages may end.

A sequence goes on after the blocks of which all pages, and the window parts of the last ones, are here. So a load of
pages is of use only up to a depth whose last window parts are in the pool, come with a pull, or lie on a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.windows.shape import deepest
from twostroke.kv_cache.windows.window_group import WindowGroup
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.scheduler.windows.held import held_by, held_of
from twostroke.worker.tiers.loads.running import reads_from
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.reader import PageRead

LOWER_TIERS = (Tier.HOST, Tier.DISK)


class WindowLoads:
    """What loads of one worker know of its window parts; one owner, one thread: the event loop."""

    def __init__(self, page_tiers: PageTiers, tiers: PageTiers, pool: BlockPool, windows: WindowGroup) -> None:
        """`tiers` are those of window parts, `page_tiers` those of the pages that parts go with."""
        self.tiers = tiers
        self._page_tiers = page_tiers
        self._pool = pool
        self._windows = windows

    def depth(self, hashes: Sequence[BlockHash], pays: Callable[[Tier, range, Sequence[BlockHash]], bool]) -> int:
        """Returns after how many of these blocks a sequence can go on once tiers have brought theirs; 0 if none does.

        `pays` tells whether blocks are to be loaded from a tier, of which some have to be read there. Pages of a tier
        above that did not pay are priced as those of the tier below. O(blocks).
        """
        if not self._page_tiers.used:
            return 0
        here = best = reached = self._pool.hits(hashes)
        above = Tier.DEVICE
        for tier in LOWER_TIERS:
            depth = self._depth_down_to(tier, hashes)
            if depth <= reached:
                above = tier
            elif pays(tier, range(best, depth), self._unread(above, hashes[best:depth])):
                best, above = depth, tier
            reached = max(reached, depth)
        if best == here:
            return 0
        if (host := self.tiers.host) is not None:
            for block in self._windows.shape.tail(best):
                host.hit(hashes[block])
        return best

    def note_reuse(self, sequence: KnownSequence) -> None:
        """Tells the tiers from which window parts the sequence goes on."""
        held = held_by(sequence)
        if held is None:
            return
        for block in self._windows.shape.tail(sequence.hit_blocks):
            slot = held.slots.get(block)
            if slot is not None and self._windows.is_filled(slot):
                self.tiers.offload.reused(slot, sequence.block_hashes[block], sequence.parent_of(block))

    def reached(self, sequence: KnownSequence, blocks: Sequence[int]) -> list[int]:
        """Returns those of the blocks that a sequence passes over where a load or a pull brings them."""
        held = held_by(sequence)
        depth = 0 if held is None else held.pulled_depth
        return [block for block in blocks if block < depth]

    def reads(self, tier: Tier, hashes: Mapping[int, BlockHash], slots: Mapping[int, PageId]) -> list[PageRead[Any]]:
        """Returns the reads of the window parts of those blocks that the tier holds."""
        return reads_from(self.tiers, tier, hashes, {block: slots[block] for block in hashes})

    def reads_of(
        self, sequence: KnownSequence, hashes: Mapping[int, BlockHash]
    ) -> Iterator[tuple[Tier, list[PageRead[Any]]]]:
        """Yields the reads of window parts for which a sequence waits, from the highest tier that holds each."""
        left = dict(hashes)
        for tier in LOWER_TIERS:
            reads = self.reads(tier, left, held_of(sequence).slots)
            if reads:
                yield tier, reads
            for read in reads:
                del left[read.block]

    def spared_blocks(self, sequence: KnownSequence) -> range:
        """Returns the blocks that a sequence does not compute where all comes that it waits for."""
        held = held_by(sequence)
        depth = 0 if held is None else held.pulled_depth
        return range(sequence.hit_blocks, depth)

    def share(self, hashes: Mapping[int, BlockHash]) -> dict[int, PageId]:
        """Holds the window parts of these blocks, whose pages the caller holds, that are coming or lie on a tier.

        `WindowGroup.unshare` releases them.
        """
        held: dict[int, PageId] = {}
        for block, block_hash in hashes.items():
            is_coming = self._windows.writer_of(block_hash) is not None
            if not (is_coming or _is_on(self.tiers, Tier.DISK, block_hash)) or not self._windows.has_room(1):
                continue
            slot = self._windows.take(block_hash)
            if slot is not None:
                held[block] = slot
                self._windows.commit(1)
        return held

    def unwritten(self, slots: Mapping[int, PageId]) -> dict[int, PageId]:
        """Returns those of the parts that nobody brings."""
        windows = self._windows
        return {block: slot for block, slot in slots.items() if windows.is_unwritten(slot)}

    def _depth_down_to(self, lowest: Tier, hashes: Sequence[BlockHash]) -> int:
        """Returns after how many of these blocks a sequence can go on with what lies here, or lower down to a tier."""
        pages = len(hashes)
        for block, block_hash in enumerate(hashes):
            if self._pool.find(block_hash) is None and not _is_on(self._page_tiers, lowest, block_hash):
                pages = block
                break
        return deepest(pages, self._windows.shape.tail_blocks, lambda block: self._has_part(lowest, hashes[block]))

    def _unread(self, above: Tier, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Returns the blocks whose pages are neither here nor on a tier down to `above`."""
        return [
            block_hash
            for block_hash in hashes
            if self._pool.find(block_hash) is None and not _is_on(self._page_tiers, above, block_hash)
        ]

    def _has_part(self, lowest: Tier, block_hash: BlockHash) -> bool:
        return self._windows.find(block_hash) is not None or _is_on(self.tiers, lowest, block_hash)


def _is_on(tiers: PageTiers, lowest: Tier, block_hash: BlockHash) -> bool:
    """Tells whether a lower tier down to this one has a part of the block."""
    return any(tiers.place(tier, block_hash) is not None for tier in LOWER_TIERS if tier <= lowest)
