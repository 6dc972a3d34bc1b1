"""The measured seconds that a page takes to be read or converted."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

WEIGHT = 0.125
"""Weight of a new measurement."""
OUTLIER = 8.0
"""A measurement counts for at most this many times the estimate."""
MOST_SLOWDOWN = 2.0
"""Two threads that read one medium each get at least half of what it can do."""


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Pages that a thread has read, and the seconds that this took."""

    alone_pages: int = 0
    alone_s: float = 0.0
    beside_pages: int = 0
    """Pages that were read while another thread read, too."""
    beside_s: float = 0.0

    def plus(self, seconds: float, *, is_beside: bool, pages: int = 1) -> ReadTimes:
        if is_beside:
            return dataclasses.replace(self, beside_pages=self.beside_pages + pages, beside_s=self.beside_s + seconds)
        return dataclasses.replace(self, alone_pages=self.alone_pages + pages, alone_s=self.alone_s + seconds)

    def times(self, count: int) -> ReadTimes:
        """Returns `count` times these reads, at the same pace."""
        return ReadTimes(
            count * self.alone_pages, count * self.alone_s, count * self.beside_pages, count * self.beside_s
        )


@dataclass(frozen=True, slots=True)
class PageTime:
    """Estimate of the seconds that reading or converting one page takes."""

    seconds: float
    """Time where one thread reads."""
    slowdown: float = MOST_SLOWDOWN
    """Factor of that while two threads read, at least 1."""

    def after(self, seconds: float, pages: int) -> PageTime:
        """Returns the estimate after this many pages took this many seconds. Each page counts as a measurement."""
        if pages <= 0 or seconds <= 0:
            return self
        measured = seconds / pages
        if not self.seconds:
            return dataclasses.replace(self, seconds=measured)
        change = _weight(pages) * (min(measured, OUTLIER * self.seconds) - self.seconds)
        return dataclasses.replace(self, seconds=self.seconds + change)

    def after_reads(self, times: ReadTimes) -> PageTime:
        """Returns the estimate after these reads.

        Only a factor from 1 to `MOST_SLOWDOWN` is taken for the slowdown of two threads. The rest changes `seconds`.
        """
        alone = self.after(times.alone_s, times.alone_pages)
        if not times.beside_pages or not alone.seconds:
            return alone
        measured = times.beside_s / (times.beside_pages * alone.seconds)
        slowdown = min(max(measured, 1.0), MOST_SLOWDOWN)
        change = _weight(times.beside_pages) * (slowdown - alone.slowdown)
        shared = alone.after(times.beside_s / slowdown, times.beside_pages)
        return dataclasses.replace(shared, slowdown=alone.slowdown + change)

    def at_least(self, seconds: float) -> PageTime:
        """Returns the estimate after a load was given up that had already taken this many seconds for each page."""
        return dataclasses.replace(self, seconds=max(self.seconds, seconds))

    def reading_s(self, pages: int, beside: int) -> float:
        """Returns the seconds of reading this many pages while another thread reads `beside` pages."""
        return self.seconds * (pages + min(pages, beside) * (self.slowdown - 1))


def _weight(pages: int) -> float:
    return 1 - (1 - WEIGHT) ** pages
