"""Messages on their way to one call: they are taken at once, and written one after the other."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Message = TypeVar("Message")


class QueuedWriter(Generic[Message]):
    """Writes one message after the other. gRPC takes each with a wait, in a task that has nothing else to do."""

    def __init__(self, write: Callable[[Message], Awaitable[None]]) -> None:
        self._write_one = write
        self._unsent: deque[Message] = deque()
        self._writing: asyncio.Task[None] | None = None
        """None: all was written."""
        self.is_started = False
        self.sent_s = time.monotonic()

    @property
    def is_idle(self) -> bool:
        return self._writing is None

    def put(self, message: Message) -> None:
        self._unsent.append(message)

    def flush(self) -> None:
        if self._unsent and self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def drain(self) -> None:
        self.flush()
        if self._writing is not None:
            await self._writing

    async def close(self) -> None:
        """Drops what is not written."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self) -> None:
        while self._unsent:
            await self._write_one(self._unsent.popleft())
            self.is_started = True
            self.sent_s = time.monotonic()
        self._writing = None
