"""A slow disk is probed now and then: loads from it are refused, so nothing else would tell that it is fast again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.tier import Tier
from twostroke.worker.measured.page_time import ReadTimes
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.price import PROBE_PAGES, pays
from twostroke.worker.tiers.reader import PageRead

PROBE_SHARE: Final = 0.1
"""Share of the time for which probes of a slow disk may keep one of its threads: the disk has others to serve."""


class SlowDisk:
    """Probes of the disk of one worker. One owner, one thread: the event loop."""

    def __init__(self, tiers: PageTiers, clock: Callable[[], float]) -> None:
        self._tiers = tiers
        self._clock = clock
        self._next_probe_s: float | None = 0.0
        """Time from which on the disk may be probed; None while a probe is under way."""

    def refused(self, block_hash: BlockHash, pages: int, compute_s: float) -> None:
        """Reads a page to nowhere where the disk itself is the reason that a load of so many pages was refused.

        `compute_s` is the predicted time of computing them.
        """
        now_s, readers = self._clock(), self._tiers.readers(Tier.DISK)
        if pays(readers.read_s(pages), compute_s) or self._next_probe_s is None or now_s < self._next_probe_s:
            return
        self._next_probe_s = None
        loop, took = asyncio.get_running_loop(), Future[ReadTimes]()
        took.add_done_callback(lambda each: loop.call_soon_threadsafe(self._probed, now_s, each))
        place = self._tiers.place(Tier.DISK, block_hash)
        readers.thread_for(1).probe(PageRead(0, block_hash, PageId(0), place), took)

    def _probed(self, began_s: float, took: Future[ReadTimes]) -> None:
        now_s = self._clock()
        self._next_probe_s = now_s + (now_s - began_s) * (1 / PROBE_SHARE - 1)
        error = took.exception()
        if error is None:
            self._tiers.readers(Tier.DISK).took(took.result().times(PROBE_PAGES))
        elif isinstance(error, OSError):
            self._tiers.failed(Tier.DISK, error)
