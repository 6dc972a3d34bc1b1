"""The price of a load: seconds per page as measured, against the seconds of computing or pulling the same blocks."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from twostroke.scheduler.cost import Queued
from twostroke.worker.measured.page_time import PageTime

PROBE_PAGES = 5
"""Number of pages that a probe of a slow disk counts as: it then makes up about half of the new estimate."""
MOST_UNLIKE = 3.0
"""Loading and computing share the blocks only where neither takes more than this many times the other's time. Together
they then take at least a quarter less than the faster one alone."""
LEAST_SHARED_S = 0.05
"""Least seconds of a load that is shared with computing: else little is gained, and a stall looks like a slow disk."""
LEAST_SHARE = 0.1
"""Fraction of the time of computing or pulling that has to pass before a load can be late."""


@dataclass(frozen=True, slots=True)
class ReadQueue:
    """What one thread of a tier has to read."""

    pages: int = 0
    fetching_s: float = 0.0
    """Time for which the fetch under way has lasted."""


def predicted_read_s(page_time: PageTime, queues: Sequence[ReadQueue], thread: int, pages: int) -> float:
    """Predicts the seconds until a thread of a tier has read this many pages more than it has in its queue."""
    own, overdue_s = queues[thread], max(0.0, queues[thread].fetching_s - page_time.seconds)
    return page_time.reading_s(own.pages + pages, _beside(queues, thread)) + overdue_s


def thread_for(page_time: PageTime, queues: Sequence[ReadQueue], pages: int) -> int:
    """Returns the thread of a tier that is to read this many pages more.

    A short load passes a long one on another thread. A load waits for another on the same thread if reading both at
    once would delay the other by more than the wait costs.
    """

    def total_s(thread: int) -> float:
        """Predicts the time of this load, and the delay of what another thread reads."""
        own, beside = queues[thread].pages, _beside(queues, thread)
        delayed_pages = min(own + pages, beside) - min(own, beside)
        delay_s = delayed_pages * (page_time.slowdown - 1) * page_time.seconds
        return predicted_read_s(page_time, queues, thread, pages) + delay_s

    return min(range(len(queues)), key=total_s)


def _beside(queues: Sequence[ReadQueue], thread: int) -> int:
    """Returns the most pages that another thread has to read."""
    return max((each.pages for index, each in enumerate(queues) if index != thread), default=0)


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted seconds of some blocks without a load."""

    compute_s: float
    other_s: float
    """The least of computing them and of pulling them where that was ordered."""

    def of_part(self, blocks: int, of: int) -> Price:
        """Returns the price of a part of the blocks."""
        return Price(self.compute_s * blocks / of, self.other_s * blocks / of)


def queued_blocks(blocks: Iterable[int], block_size: int) -> Queued:
    """Returns the work of computing these blocks of one sequence."""
    numbers = list(blocks)
    pairs = sum((block + 0.5) * block_size**2 for block in numbers)
    return Queued(len(numbers) * block_size, pairs)


def blocks_to_compute(count: int, load_s: Callable[[int], float], compute_s: Callable[[int], float]) -> int:
    """Returns how many of the first blocks to compute while the rest of `count` is loaded, so that both end together.

    `load_s` predicts the time of loading a number of last blocks, `compute_s` that of computing a number of first ones.
    """
    return bisect.bisect_left(range(count), 0.0, key=lambda first: compute_s(first + 1) - load_s(count - first - 1))


def pays_in_part(load_s: float, other_s: float, *, is_alone: bool) -> bool:
    """Returns whether to compute first blocks while a load brings the last ones, where nothing else would bring any.

    A load that is faster than computing is shared only if nothing else is computed here (`is_alone`).
    """
    if load_s < LEAST_SHARED_S:
        return False
    is_slower = other_s <= load_s <= MOST_UNLIKE * other_s
    return is_slower or (is_alone and other_s <= MOST_UNLIKE * load_s <= MOST_UNLIKE * other_s)


def pays(load_s: float, other_s: float) -> bool:
    """Returns whether a load is worth beginning."""
    return load_s < other_s


def is_late(elapsed_s: float, wait_s: float, arrived: int, wanted: int, other_s: float) -> bool:
    """Returns whether a load is to be given up: at its pace so far, what takes `other_s` would have been done sooner.

    `wait_s` was predicted to pass before its first page is read.
    """
    reading_s = elapsed_s - wait_s
    return elapsed_s > LEAST_SHARE * other_s and reading_s * wanted > (arrived + 1) * (other_s - wait_s)
