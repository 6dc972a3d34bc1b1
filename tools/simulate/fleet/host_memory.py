"""A simulated worker's host memory behind its pages: what is evicted goes there, and comes back over its own bus.

Least recently used goes first. Blocks come back one request after the other, as copies over one bus do.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from tools.simulate.fleet.event_queue import EventQueue
from tools.simulate.fleet.shape import FleetShape, HostTier
from twostroke.ids import BlockHash, PageId, SessionId
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.tier import Tier
from twostroke.rpc.v1 import control_pb2
from twostroke.scheduler.sequence import Sequence


class Owner(Protocol):
    @property
    def queue(self) -> EventQueue: ...
    @property
    def shape(self) -> FleetShape: ...
    @property
    def pool(self) -> BlockPool: ...
    @property
    def log(self) -> EventLog: ...
    @property
    def is_dead(self) -> bool: ...

    def new_session(self) -> SessionId: ...
    def wake(self) -> None: ...


class HostMemory:
    def __init__(self, owner: Owner, tier: HostTier) -> None:
        self._owner = owner
        self._pages = tier.pages
        self._page_s = owner.shape.page_bytes / tier.bytes_per_s
        self._names: OrderedDict[BlockHash, None] = OrderedDict()
        self._bus_free_s = 0.0
        self.rate = control_pb2.TierRate(tier=control_pb2.TIER_HOST, page_s=self._page_s)

    def keep(self, name: BlockHash) -> None:
        """It has left the device."""
        if name not in self._names:
            self._owner.log.stored(name, Tier.HOST)
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._pages:
            oldest, _ = self._names.popitem(last=False)
            self._owner.log.removed(oldest, Tier.HOST)

    def bring_up(self, sequence: Sequence, missing: list[int]) -> list[int]:
        """Start to load missing blocks of an admitted sequence, and return those that are on their way now."""
        owner = self._owner
        blocks = [block for block in missing if sequence.block_hashes[block] in self._names]
        if not blocks:
            return blocks
        pages = {block: sequence.pages[block] for block in blocks}
        session = owner.new_session()
        for block, page in pages.items():
            self._names.move_to_end(sequence.block_hashes[block])
            owner.pool.assign_writer(page, session)
        self._bus_free_s = max(owner.queue.now_s, self._bus_free_s) + len(blocks) * self._page_s
        owner.queue.at(self._bus_free_s, lambda: self._come(pages))
        return blocks

    def _come(self, pages: dict[int, PageId]) -> None:
        owner = self._owner
        if owner.is_dead:
            return
        for page in pages.values():
            if owner.pool.is_arriving(page):
                owner.pool.fill(page)
            else:  # nobody waits for it any more
                owner.pool.clear_writer(page)
        owner.wake()
