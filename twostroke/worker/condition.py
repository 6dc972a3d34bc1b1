"""Condition: wakes everybody who waits, each time something happened."""

from __future__ import annotations

import asyncio


class Condition:
    """A ticket's `wait` returns after the next `notify`. Take it before looking at the state, so none is missed."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        notified, self._next = self._next, asyncio.Event()
        notified.set()

    def ticket(self) -> asyncio.Event:
        return self._next
