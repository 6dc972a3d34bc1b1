"""Ends connections whose clients read nothing of their response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ReaderWatch:
    """Watches a client for which written bytes wait. A slow reader may go on: one write may be a whole response."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport, most_s: float, end: Callable[[], None]) -> None:
        """Gives the client `most_s` seconds for the next bytes, again and again. Calls `end` when it reads none."""
        self.stop()
        unsent = transport.get_write_buffer_size()

        def look() -> None:
            if transport.get_write_buffer_size() < unsent:
                self.start(transport, most_s, end)
            else:
                end()

        self._due = self._loop.call_later(most_s, look)

    def stop(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
