"""The loads of one worker: those under way, and whom they are begun for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from twostroke.base.ids import SessionId
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.cost import Queued
from twostroke.worker.tiers.loads.prices import LoadPrices
from twostroke.worker.tiers.loads.running import RunningLoads
from twostroke.worker.tiers.loads.sequence_loads import SequenceLoads
from twostroke.worker.tiers.loads.shared_loads import SharedLoads
from twostroke.worker.tiers.page_tiers import PageTiers


class TierLoads:
    """Loads of one epoch of a worker. One owner, one thread: the event loop."""

    def __init__(
        self,
        tiers: Sequence[PageTiers],
        pool: BlockPool,
        block_size: int,
        *,
        new_session: Callable[[], SessionId],
        compute_s: Callable[[Queued], float],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tiers` are those of each page group.

        `compute_s` predicts the seconds that this work would take here beside the current streams. `wake` is called as
        pages arrive.
        """
        self.prices = [LoadPrices(each, block_size, compute_s, clock) for each in tiers]
        self.running = RunningLoads(
            tiers, pool, self.prices[GroupKind.FULL], new_session=new_session, wake=wake, clock=clock
        )
        self.for_sequences = SequenceLoads(tiers, pool, self.running, self.prices)
        self.for_others = SharedLoads(tiers, pool, self.running, self.prices)
