"""What a hostile client knows of the server, and how it keeps to its time and its share of a core."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

CPU_SHARE = 0.3
"""Part of a core that a hostile client uses at most. All processes share this machine's cores: one that burns them
would slow its neighbours without any request."""
BROKEN_OFF = (
    *(OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError, asyncio.InvalidStateError),
    *(grpc.RpcError, grpc.aio.UsageError, grpc.aio.InternalError),
)
"""How attempts end where the server refuses them, or hangs up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    http: str
    grpc: str
    admin: str
    metrics: str
    fleet: str
    workers: tuple[str, ...]
    """Addresses of their rpc servers."""
    worker_metrics: tuple[str, ...]
    pages: tuple[str, ...]
    """Addresses of their other ports, at which they hand over pages."""
    model: str
    most_connections: int
    ca: str = ""
    """File with the CA of the clients' ports; empty: they are plain."""
    key: str = ""
    """Empty: the server asks for none."""


class Play:
    """One hostile client while it plays."""

    def __init__(self, target: Target, seconds: float, seed: int) -> None:
        self.target = target
        self.draw = random.Random(seed)
        self.sent = 0
        """Attempts: requests, connections or frames, whatever it repeats."""
        self._until_s = time.monotonic() + seconds
        self._begun_s, self._cpu_s = time.monotonic(), time.process_time()

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._cpu_s

    async def pace(self) -> None:
        """Waits until the process is back within its share; called between attempts."""
        self.sent += 1
        ahead_s = self.cpu_s / CPU_SHARE - (time.monotonic() - self._begun_s)
        await asyncio.sleep(min(max(0.0, ahead_s), self.left_s))

    async def hold(self) -> None:
        """Stay until the end."""
        await asyncio.sleep(self.left_s)

    async def repeat(self, attempt: Callable[[], Awaitable[object]], at_once: int = 1) -> None:
        """Attempts one after the other until the time is over, `at_once` of them side by side."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(self._repeat(attempt))

    async def _repeat(self, attempt: Callable[[], Awaitable[object]]) -> None:
        while self.left_s:
            try:
                async with asyncio.timeout(self.left_s + 0.1):
                    await attempt()
            except BROKEN_OFF:
                pass
            await self.pace()


Hostile = Callable[[Play], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    port: str
    """At which it knocks."""
    has_key: bool
    """It shows its own key, where the server asks for keys."""
    run: Hostile

    @property
    def what(self) -> str:
        return (self.run.__doc__ or "").strip()


class Table:
    """Entries in the order in which they are written down."""

    def __init__(self, port: str) -> None:
        self.entries: list[Entry] = []
        self._port = port

    def entry(self, *, key: bool, port: str = "") -> Callable[[Hostile], Hostile]:
        def add(run: Hostile) -> Hostile:
            name = getattr(run, "__name__", "").replace("_", " ")
            self.entries.append(Entry(name, port or self._port, key, run))
            return run

        return add
