"""The loads of one worker: those under way, and whom they are begun for."""

from __future__ import annotations

import time
from collections.abc import Callable

from twostroke.base.ids import SessionId
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.window_group import window_group_of
from twostroke.scheduler.cost import Queued
from twostroke.worker.tiers.loads.prices import LoadPrices
from twostroke.worker.tiers.loads.running import RunningLoads
from twostroke.worker.tiers.loads.sequence_loads import SequenceLoads
from twostroke.worker.tiers.loads.shared_loads import SharedLoads
from twostroke.worker.tiers.loads.window_loads import WindowLoads
from twostroke.worker.tiers.page_tiers import PageTiers


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
        windows: WindowLoads | None = None
        groups = {GroupKind.FULL: tiers}
        group = window_group_of(pool)
        if window_tiers is not None and group is not None:
            windows = WindowLoads(tiers, window_tiers, pool, group)
            groups[GroupKind.FURTHER] = window_tiers
        self.prices = LoadPrices(tiers, block_size, compute_s, clock)
        self.running = RunningLoads(groups, pool, self.prices, new_session=new_session, wake=wake, clock=clock)
        self.for_sequences = SequenceLoads(tiers, pool, self.running, self.prices, windows)
        self.for_others = SharedLoads(tiers, pool, self.running, self.prices, windows)
