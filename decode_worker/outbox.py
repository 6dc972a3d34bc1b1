"""One token stream per router: one message per step carries all of its requests' tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from twostroke.rpc.v1 import worker_pb2


class Outbox:
    """Entries for one router. While no stream is connected they are dropped: the router attaches and asks again."""

    def __init__(self, grace_s: float, on_abandoned: Callable[[], None]) -> None:
        self._grace_s = grace_s
        self._on_abandoned = on_abandoned
        self._entries: list[worker_pb2.TokenEntry] = []
        self._filled = asyncio.Event()
        self._stream: object | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._start_grace()

    def add(self, entry: worker_pb2.TokenEntry) -> None:
        if self._stream is not None:
            self._entries.append(entry)
            self._filled.set()

    async def stream(self) -> AsyncIterator[worker_pb2.TokenBatch]:
        """Batches as they come. A newer stream of the same router ends this one."""
        mine = self._stream = object()
        self._stop_grace()
        self._entries.clear()
        try:
            yield worker_pb2.TokenBatch()
            while True:
                await self._filled.wait()
                if self._stream is not mine:
                    return
                self._filled.clear()
                entries, self._entries = self._entries, []
                yield worker_pb2.TokenBatch(entries=entries)
        finally:
            if self._stream is mine:
                self._stream = None
                self._start_grace()

    def close(self) -> None:
        self._stop_grace()

    def _start_grace(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._on_abandoned)

    def _stop_grace(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._filled.set()
        self._filled = asyncio.Event()
