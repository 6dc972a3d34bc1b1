"""What loads of one worker cost, and what they are compared with: computing the blocks, or what others send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Final

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.tier import Tier
from twostroke.scheduler.cost import Queued
from twostroke.worker.measured.page_time import ReadTimes
from twostroke.worker.supply.supply import Behind
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.price import PROBE_PAGES, Price, blocks_to_compute, pays, pays_in_part, queued_blocks
from twostroke.worker.tiers.reader import PageRead

PROBE_SHARE: Final = 0.1
"""Fraction of the time for which probes may occupy a thread of a slow disk: it has other reads to serve."""


class SlowDisk:
    """Probes of the disk of one worker. One owner, one thread: the event loop."""

    def __init__(self, tiers: PageTiers, clock: Callable[[], float]) -> None:
        self._tiers = tiers
        self._clock = clock
        self._next_probe_s: float | None = 0.0
        """Time from which on the disk may be probed; None while a probe is under way."""

    def refused(self, blocks: Iterable[BlockHash], pages: int, compute_s: float) -> None:
        """Probes the disk with one page if the disk itself is why a load of this many pages was refused.

        `blocks`: those of the load, of which some may lie on another tier alone. `compute_s` is the predicted time of
        computing them.
        """
        now_s, readers = self._clock(), self._tiers.readers(Tier.DISK)
        if pays(readers.read_s(pages), compute_s) or self._next_probe_s is None or now_s < self._next_probe_s:
            return
        on_disk = ((each, self._tiers.place(Tier.DISK, each)) for each in blocks)
        block_hash, place = next((found for found in on_disk if found[1] is not None), (None, None))
        if block_hash is None:
            return
        self._next_probe_s = None
        loop, took = asyncio.get_running_loop(), Future[ReadTimes]()
        took.add_done_callback(lambda each: loop.call_soon_threadsafe(self._probed, now_s, each))
        readers.thread_for(1).probe(PageRead(0, block_hash, PageId(0), place), took)

    def _probed(self, began_s: float, took: Future[ReadTimes]) -> None:
        now_s = self._clock()
        self._next_probe_s = now_s + (now_s - began_s) * (1 / PROBE_SHARE - 1)
        error = took.exception()
        if error is None:
            self._tiers.readers(Tier.DISK).took(took.result().times(PROBE_PAGES))
        elif isinstance(error, OSError):
            self._tiers.failed(Tier.DISK, error)


class LoadPrices:
    """One owner, one thread: the event loop."""

    def __init__(
        self, tiers: PageTiers, block_size: int, compute_s: Callable[[Queued], float], clock: Callable[[], float]
    ) -> None:
        """`compute_s` predicts the seconds that this work would take here beside the current streams."""
        self._tiers = tiers
        self._block_size = block_size
        self._compute_s = compute_s
        self._slow_disk = SlowDisk(tiers, clock)

    def compute_s(self, blocks: Iterable[int]) -> float:
        """Predicts the seconds for computing these blocks of one sequence here, beside the current streams."""
        return self._compute_s(queued_blocks(blocks, self._block_size))

    def load_s(self, tier: Tier, pages: int) -> float:
        """Predicts the seconds of loading this many pages, with those queued before and those read meanwhile."""
        return self._tiers.readers(tier).load_s(pages)

    def of(self, tier: Tier, hashes: Sequence[BlockHash], held: Sequence[int], behind: Behind | None) -> Price | None:
        """Predicts how long these blocks take without the tier; returns None where a load would take longer."""
        compute_s = self.compute_s(held)
        price = Price(compute_s, compute_s if behind is None else min(compute_s, behind.arrival_s(held)))
        if pays(self.load_s(tier, len(held)), price.other_s):
            return price
        self._tiers.metrics.refused(tier)
        if tier is Tier.DISK:
            self._slow_disk.refused((hashes[each] for each in held), len(held), compute_s)
        return None

    def pays_to_reach(self, tier: Tier, blocks: range, unread: Sequence[BlockHash], *, is_alone: bool) -> bool:
        """Returns whether blocks after which a sequence could continue are loaded from a tier, all or the last ones.

        `unread`: those whose pages have to be read from this tier. `is_alone`: nothing else is computed here.
        """
        load_s, compute_s = self.load_s(tier, len(unread)), self.compute_s(blocks)
        if pays(load_s, compute_s) or pays_in_part(load_s, compute_s, is_alone=is_alone):
            return True
        if tier is Tier.DISK and unread:
            self._slow_disk.refused(unread, len(unread), compute_s)
        return False

    def first_to_load(self, tier: Tier, blocks: Sequence[int]) -> int:
        """Returns how many first blocks to compute while a load brings the others from the end."""
        return self.to_compute(blocks, lambda count: self.load_s(tier, count))

    def to_compute(self, blocks: Sequence[int], load_s: Callable[[int], float]) -> int:
        """Returns how many first blocks to compute while the others are loaded, which takes `load_s`(their number)."""
        return blocks_to_compute(len(blocks), load_s, lambda count: self.compute_s(blocks[:count]))
