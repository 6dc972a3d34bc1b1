"""Which page a disk is probed with, after a load of it was refused."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.tier import Tier
from twostroke.worker.tiers.loads.prices import SlowDisk
from twostroke.worker.tiers.page_tiers import PageTiers
from twostroke.worker.tiers.reader import PageRead

IN_MEMORY, ON_DISK = (BlockHash(bytes([number]) * 16) for number in range(2))


class SlowTiers:
    """A disk with one block, which takes ten seconds for it."""

    def __init__(self) -> None:
        self.probed: list[PageRead] = []

    def place(self, tier: Tier, block_hash: BlockHash) -> int | None:
        return 7 if (tier, block_hash) == (Tier.DISK, ON_DISK) else None

    def readers(self, tier: Tier) -> SlowTiers:
        return self

    def read_s(self, pages: int) -> float:
        return 10.0 * pages

    def thread_for(self, pages: int) -> SlowTiers:
        return self

    def probe(self, read: PageRead, took: Future[Any]) -> None:
        self.probed.append(read)


async def test_a_disk_is_probed_with_a_page_that_lies_there() -> None:
    tiers = SlowTiers()
    disk = SlowDisk(cast(PageTiers, tiers), lambda: 0.0)
    disk.refused([IN_MEMORY], 1, 0.001)
    assert tiers.probed == []
    disk.refused([IN_MEMORY, ON_DISK], 2, 0.001)
    assert [(read.block_hash, read.place) for read in tiers.probed] == [(ON_DISK, 7)]
