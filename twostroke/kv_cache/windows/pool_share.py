"""The shares of page groups in a pool's memory. Plain numbers.

A sequence needs a page in the full group for each of its blocks, and in a window group only for the last ones. So the
window group has fewer pages. The ratio is that of a sequence of the usual length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from twostroke.config import WorkerConfig
from twostroke.kv_cache.groups.page_group import PageGroup
from twostroke.kv_cache.layout import PageRegion, PoolLayout
from twostroke.kv_cache.pool_size import GroupPages, PoolSize, enough_pages

USUAL_WINDOWS: Final = 4
"""The usual length of a sequence, in windows. With shorter sequences the pages of windows run out first, and
with longer ones the other pages. Models with windows are made for several times their length."""
SPARE_BLOCKS: Final = 2
"""Blocks of window pages in addition to those that the window spans: a window begins and ends within a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPool:
    """The values that the split of a pool depends on, besides its bytes."""

    page_sizes: tuple[int, ...]
    """Bytes of a page of each group: the full one, and the window group if its pages lie apart."""
    window: int | None = None
    """Tokens that layers of the window group see."""
    block_size: int
    longest: int
    """Tokens of the longest request."""
    step_tokens: int
    window_share: float | None = None
    """Pages of the window group for each page of the full one; None: what sequences of a usual length need."""

    @classmethod
    def of(
        cls,
        config: WorkerConfig,
        groups: Sequence[PageGroup],
        page_sizes: tuple[int, ...],
        *,
        longest: int,
        on_gpu: bool = False,
    ) -> SharedPool:
        """Returns the pool of a worker, with pages of these sizes for each group."""
        return cls(
            page_sizes=page_sizes,
            window=groups[-1].window,
            block_size=config.cache.block_size,
            longest=longest,
            step_tokens=config.schedule.step_tokens(on_gpu=on_gpu),
            window_share=config.cache.kv_window_share,
        )

    def layout(self, memory_bytes: int) -> PoolLayout:
        """Returns how many pages of each group the memory holds. Raises ConfigError where they are too few."""
        full_bytes, *others = self.page_sizes
        if not others:
            return PoolLayout.of(enough_pages(memory_bytes, full_bytes), full_bytes)
        (window_bytes,) = others
        most = enough_pages(memory_bytes, full_bytes + window_bytes)
        usual = int(self.share * memory_bytes / (full_bytes + self.share * window_bytes))
        windows = min(most, max(usual, self.least_windows))
        pages = most if windows == most else (memory_bytes - windows * window_bytes) // full_bytes
        return PoolLayout.of(pages, full_bytes, PageRegion(windows, window_bytes))

    @property
    def share(self) -> float:
        """Pages of the window group for each page of the full one."""
        if self.window_share is not None:
            return self.window_share
        usual = -(-min(self.longest, USUAL_WINDOWS * self._window) // self.block_size)
        return min(1.0, self._window_blocks / usual)

    @property
    def least_windows(self) -> int:
        """Fewest window pages with which one request alone can run: some to pull into, some to compute from."""
        return 2 * self._window_blocks + -(-self.step_tokens // self.block_size)

    def size_of(self, layout: PoolLayout) -> PoolSize:
        """Returns the figures of a pool with these pages."""
        first, *others = layout.regions
        if not others:
            return PoolSize(first.pages, first.page_bytes, self.block_size)
        windows = GroupPages(others[0].pages, others[0].page_bytes, self._window, self._window_blocks)
        return PoolSize(first.pages, first.page_bytes, self.block_size, (windows,))

    @property
    def _window(self) -> int:
        assert self.window is not None, "the second of two groups has a window"
        return self.window

    @property
    def _window_blocks(self) -> int:
        """Blocks of a window's pages that one sequence holds."""
        return -(-self._window // self.block_size) + SPARE_BLOCKS
