"""The price of a load: seconds per page as measured, against the seconds of computing or pulling the same blocks."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from twostroke.scheduler.cost import Queued

WEIGHT = 0.125
"""Weight of a new measurement."""
OUTLIER = 8.0
"""A measurement counts for at most this many times the estimate."""
PROBE_PAGES = 5
"""A probe of a disk that was slow counts as so many pages: about half."""
MOST_UNLIKE = 3.0
"""Loading and computing together take at least a quarter less than the better one where neither takes more than so many
times the other's time."""
LEAST_SHARED_S = 0.05
"""Shorter loads are not shared with computing: little can be gained, and a stall of the disk looks like a slow one."""
LEAST_SHARE = 0.1
"""Share of the time of computing or pulling for which a load may lag behind before it is given up."""


@dataclass(frozen=True, slots=True)
class PageTime:
    """Estimate of the seconds that a tier takes to bring up one page, other loads not counted."""

    seconds: float

    def after(self, seconds: float, pages: int) -> PageTime:
        """Return the estimate after so many pages took so many seconds; many pages count as much as many loads."""
        if pages <= 0 or seconds <= 0:
            return self
        measured, weight = seconds / pages, 1 - (1 - WEIGHT) ** pages
        if not self.seconds:
            return PageTime(measured)
        return PageTime(self.seconds + weight * (min(measured, OUTLIER * self.seconds) - self.seconds))

    def at_least(self, seconds: float) -> PageTime:
        """Return the estimate after a load was given up that had taken so many seconds for each page and more."""
        return PageTime(max(self.seconds, seconds))


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted seconds of some blocks without a load."""

    compute_s: float
    other_s: float
    """The least of computing them and of pulling them where that was ordered."""

    def of_part(self, blocks: int, of: int) -> Price:
        """Return the price of a part of the blocks."""
        return Price(self.compute_s * blocks / of, self.other_s * blocks / of)


def queued_blocks(blocks: Iterable[int], block_size: int) -> Queued:
    """Return the work of computing these blocks of one sequence."""
    numbers = list(blocks)
    pairs = sum((block + 0.5) * block_size**2 for block in numbers)
    return Queued(len(numbers) * block_size, pairs)


def blocks_to_compute(count: int, load_s: Callable[[int], float], compute_s: Callable[[int], float]) -> int:
    """Return how many first ones of `count` blocks to compute while the others are loaded, so that both end together.

    `load_s` predicts the time of loading so many of the last ones, `compute_s` of computing so many of the first ones.
    """
    return bisect.bisect_left(range(count), 0.0, key=lambda first: compute_s(first + 1) - load_s(count - first - 1))


def pays_in_part(load_s: float, other_s: float, *, is_alone: bool) -> bool:
    """Tell whether to compute first blocks while a load brings the last ones, where nothing else would bring any.

    What a load would bring soon is not computed, and not at all beside other work (unless `is_alone`).
    """
    if load_s < LEAST_SHARED_S:
        return False
    is_slower = other_s <= load_s <= MOST_UNLIKE * other_s
    return is_slower or (is_alone and other_s <= MOST_UNLIKE * load_s <= MOST_UNLIKE * other_s)


def pays(load_s: float, other_s: float) -> bool:
    """Tell whether a load is worth beginning."""
    return load_s < other_s


def is_late(elapsed_s: float, wait_s: float, arrived: int, wanted: int, other_s: float) -> bool:
    """Tell whether a load is to be given up: at its pace so far, what takes `other_s` would have been done sooner.

    `wait_s` was predicted to pass before its first page is read.
    """
    reading_s = elapsed_s - wait_s
    return elapsed_s > LEAST_SHARE * other_s and reading_s * wanted > (arrived + 1) * (other_s - wait_s)
