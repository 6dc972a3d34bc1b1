"""Serves Pull from the cache alone: at once, whoever asks, and nothing is computed or awaited for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.errors import TransferFailed
from twostroke.ids import BlockName, PageId
from twostroke.kv_cache.pool import BlockPool


class ResidentJob:
    """Holds those of the wanted blocks that were here when the pull began."""

    def __init__(
        self, pool: BlockPool, names: Sequence[BlockName], blocks: Sequence[int], wake: Callable[[], None]
    ) -> None:
        self._pool = pool
        self._wake = wake
        self._pages = dict(zip(blocks, pool.share_filled([names[block] for block in blocks]), strict=True))

    def page(self, block: int) -> PageId | None:
        page = self._pages[block]
        if page is None:
            raise TransferFailed(f"block {block} is not here, and nothing is computed here for this pull")
        return page

    def was_computed(self, block: int) -> bool:
        return False

    def close(self) -> None:
        self._pool.release([page for page in self._pages.values() if page is not None])
        self._wake()
