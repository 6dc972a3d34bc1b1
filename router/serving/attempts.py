"""Numbers for attempts at answers: of two, by whichever routers, the later has the higher one."""

from __future__ import annotations

import time
from collections.abc import Callable

CLOCK_BITS = 52
"""Microseconds since 1970 fit in until 2112."""
MOST_RESUMPTIONS = (1 << 12) - 1
"""What is left of 64 bits."""


def first_attempt(resumptions: int) -> int:
    """Of a stream that was resumed so often: a router that still lives, and does not know that its client has gone to
    another one, stays behind whatever its clock says."""
    return resumptions << CLOCK_BITS


class Attempts:
    """By the wall clock. Where a client uses an id again, a late Close or token of the earlier request is not mistaken
    for the new one's."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._latest = -1

    def next(self, at_least: int = 0) -> int:
        """To be called with `first_attempt`, or with one more than an attempt that was found."""
        begin = first_attempt(at_least >> CLOCK_BITS)
        self._latest = max(self._latest + 1, self._clock_ns() // 1000, at_least - begin)
        return begin + self._latest
