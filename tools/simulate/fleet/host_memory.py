"""A simulated worker's host memory behind its pages: what is evicted goes there, and comes back over its own bus.

The least recently used block goes first. Blocks come back one request after the other, as copies over one bus do.
"""

from __future__ import annotations

from collections import OrderedDict

from tools.simulate.fleet.pulls import Party
from tools.simulate.fleet.shape import HostTier
from twostroke.ids import BlockHash, PageId
from twostroke.kv_cache.tier import Tier
from twostroke.rpc.v1 import control_pb2
from twostroke.scheduler.sequence import Sequence


class HostMemory:
    def __init__(self, host: Party, tier: HostTier) -> None:
        self._host = host
        self._capacity_pages = tier.pages
        self._page_s = host.shape.page_bytes / tier.bytes_per_s
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()
        """Blocks that are here, the least recently used first."""
        self._bus_free_s = 0.0
        self.rate = control_pb2.TierRate(tier=control_pb2.TIER_HOST, page_s=self._page_s)

    def store(self, block: BlockHash) -> None:
        """Take in a block that was evicted from the device."""
        if block not in self._blocks:
            self._host.log.stored(block, Tier.HOST)
        self._blocks[block] = None
        self._blocks.move_to_end(block)
        if len(self._blocks) > self._capacity_pages:
            oldest, _ = self._blocks.popitem(last=False)
            self._host.log.removed(oldest, Tier.HOST)

    def load(self, sequence: Sequence, missing: list[int]) -> list[int]:
        """Start to load missing blocks of an admitted sequence, and return those that are on their way now."""
        host = self._host
        blocks = [block for block in missing if sequence.block_hashes[block] in self._blocks]
        if not blocks:
            return blocks
        pages = [sequence.pages[block] for block in blocks]
        session = host.new_session()
        for block, page in zip(blocks, pages, strict=True):
            self._blocks.move_to_end(sequence.block_hashes[block])
            host.pool.assign_writer(page, session)
        self._bus_free_s = max(host.queue.now_s, self._bus_free_s) + len(blocks) * self._page_s
        host.queue.at(self._bus_free_s, lambda: self._loaded(pages))
        return blocks

    def _loaded(self, pages: list[PageId]) -> None:
        """The pages of one request have come over the bus."""
        host = self._host
        if host.is_dead:
            return
        for page in pages:
            if host.pool.is_arriving(page):
                host.pool.fill(page)
            else:  # nobody waits for it any more
                host.pool.clear_writer(page)
        host.wake()
