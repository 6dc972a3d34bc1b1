"""Serves Pull from the cache alone: a decode worker computes for its own requests only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.errors import TransferFailed
from twostroke.ids import BlockName, PageId
from twostroke.kv_cache.pool import BlockPool


class ResidentJob:
    """Holds those blocks of a pull that were here when it began."""

    def __init__(self, pool: BlockPool, names: Sequence[BlockName], wake: Callable[[], None]) -> None:
        self._pool = pool
        self._wake = wake
        self._pages = pool.share_filled(names)

    def page(self, block: int) -> PageId | None:
        page = self._pages[block]
        if page is None:
            raise TransferFailed(f"block {block} is not here, and decode workers do not compute for others")
        return page

    def was_computed(self, block: int) -> bool:
        return False

    def close(self) -> None:
        self._pool.release([page for page in self._pages if page is not None])
        self._wake()
