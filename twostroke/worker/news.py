"""News: wakes everybody who waits, each time something happened."""

from __future__ import annotations

import asyncio


class News:
    """`wait` returns after the next `tell`. Take a ticket before looking, so that nothing told meanwhile is missed."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        told, self._next = self._next, asyncio.Event()
        told.set()

    def ticket(self) -> asyncio.Event:
        return self._next
