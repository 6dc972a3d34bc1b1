"""How a pool's pages lie in its memory: one region for the pages of each page group, side by side. Plain numbers.

Pages of all groups are numbered consecutively, those of the first group first. So a page's number gives its address and
size.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SCRATCH_PAGES: Final = 1
"""Pages at the end of each region that are never handed out: KV that is not kept is written there."""
GENERATION_BYTES: Final = 8
"""Bytes of a page's generation, a u64."""
REGION_ALIGNMENT: Final = mmap.PAGESIZE
"""Bytes: a region after another begins on a page of the system, which suits every type of number and every device."""


def generation_bytes(pages: int) -> int:
    """Returns the bytes of the generations of this many pages, rounded up to a system page."""
    return -(-pages * GENERATION_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class PageRegion:
    """The pages of one group, and a scratch page after them."""

    pages: int
    page_bytes: int

    @property
    def size_bytes(self) -> int:
        return (self.pages + SCRATCH_PAGES) * self.page_bytes


@dataclass(frozen=True)  # no slots: values that copies read for each page are cached
class PoolLayout:
    """The regions of one pool. A row is a page of one region, counted from the region's first."""

    regions: tuple[PageRegion, ...]

    @classmethod
    def of(cls, pages: int, page_bytes: int, *further: PageRegion) -> PoolLayout:
        """Returns the layout of the first group's pages and those of further groups."""
        return cls((PageRegion(pages, page_bytes), *further))

    @functools.cached_property
    def pages(self) -> int:
        """Pages of all regions."""
        return sum(region.pages for region in self.regions)

    @functools.cached_property
    def page_sizes(self) -> tuple[int, ...]:
        """Bytes of a page of each region."""
        return tuple(region.page_bytes for region in self.regions)

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of one block's pages in all groups."""
        return sum(self.page_sizes)

    def share(self, region: int) -> float:
        """Returns the fraction of the bytes of all pages that one region has."""
        own = self.regions[region]
        return own.pages * own.page_bytes / sum(each.pages * each.page_bytes for each in self.regions)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Offset of each region in bytes."""
        starts, end = [], 0
        for region in self.regions:
            starts.append(-(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT)
            end = starts[-1] + region.size_bytes
        return tuple(starts)

    @property
    def size_bytes(self) -> int:
        """Bytes of all regions."""
        return self.starts[-1] + self.regions[-1].size_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of a pool in host memory: its regions, and a generation for each page."""
        return generation_bytes(self.pages) + self.size_bytes

    @functools.cached_property
    def _firsts(self) -> tuple[int, ...]:
        """The number of each region's first page."""
        return tuple(itertools.accumulate((region.pages for region in self.regions[:-1]), initial=0))

    def first(self, region: int) -> int:
        """Returns the number of a region's first page."""
        return self._firsts[region]

    def region_of(self, page: int) -> int:
        """Returns the region of a page. A scratch page has a number only in a pool with one region."""
        return bisect.bisect_right(self._firsts, page) - 1

    def page_bytes_of(self, page: int) -> int:
        return self.regions[self.region_of(page)].page_bytes

    def bytes_of(self, pages: Sequence[int]) -> int:
        """Returns the bytes of some pages together."""
        sizes = self.page_sizes
        if len(sizes) == 1:
            return len(pages) * sizes[0]
        return sum(sizes[self.region_of(page)] for page in pages)

    def span(self, page: int) -> slice:
        """Returns where a page lies, in bytes from the first region's start."""
        region = self.region_of(page)
        size = self.regions[region].page_bytes
        start = self.starts[region] + (page - self.first(region)) * size
        return slice(start, start + size)
