"""Notification of changes: of all waiters at each change, or gathered into few messages."""

from __future__ import annotations

import asyncio

GATHER_S = 0.02
"""Least seconds between two messages of one sender, except urgent ones: steps of some models are shorter. Reports of
that age do not make a router's decisions worse, and a puller copies the pages of that time faster in one batch."""
MANY_BYTES = 16 << 20
"""Bytes of pages from which on a message is sent at once: to copy them takes as long as many messages."""


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
        """Seconds that the next message still has to wait; 0: it need not wait."""
        return max(0.0, self._next_s - asyncio.get_running_loop().time())

    def sent(self) -> None:
        self._next_s = asyncio.get_running_loop().time() + GATHER_S
