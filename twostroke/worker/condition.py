"""How changes are told: to everybody who waits, each time something happened, or gathered into few messages."""

from __future__ import annotations

import asyncio

GATHER_S = 0.02
"""Least time between two messages of one sender, but for what is urgent: steps of some models are shorter. A router
decides no worse by what is so old, and a puller copies what comes within that time faster than one message after
another."""
MANY_BYTES = 16 << 20
"""Bytes of pages that are worth a message at once: to copy them takes as long as many messages."""


class Condition:
    """A ticket's `wait` returns after the next `notify`. Take it before looking at the state, so none is missed."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        notified, self._next = self._next, asyncio.Event()
        notified.set()

    def ticket(self) -> asyncio.Event:
        return self._next


class Gathering:
    """The times of one sender's messages."""

    def __init__(self) -> None:
        self._next_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that the next message is to wait, 0 for none."""
        return max(0.0, self._next_s - asyncio.get_running_loop().time())

    def sent(self) -> None:
        self._next_s = asyncio.get_running_loop().time() + GATHER_S
