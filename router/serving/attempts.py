"""Numbers of attempts at a request: the later of two attempts has the higher one, whichever routers made them."""

from __future__ import annotations

import time
from collections.abc import Callable

CLOCK_BITS = 52
"""Bits for the clock: microseconds since 1970 fit in until 2112."""
MOST_RESUMPTIONS = (1 << 12) - 1
"""What is left of 64 bits."""


def first_attempt(resumptions: int) -> int:
    """Returns the least number of a stream that was resumed so often.

    A router that does not know that its client has gone to another one stays behind, whatever its clock says.
    """
    return resumptions << CLOCK_BITS


class Attempts:
    """Numbers follow the wall clock: a late Close or token of an earlier request with the same id is recognised."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._latest = -1

    def next(self, at_least: int = 0) -> int:
        """`at_least` is `first_attempt`, or one more than an attempt that was found."""
        begin = first_attempt(at_least >> CLOCK_BITS)
        self._latest = max(self._latest + 1, self._clock_ns() // 1000, at_least - begin)
        return begin + self._latest
