"""Requests at a fixed rate, and pages of the console that are open: both as cheap as Python can make them."""

from __future__ import annotations

import asyncio
import collections
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.trials.bench.console.serving import MODEL, Served
from twostroke.base.errors import PeerLost

PROMPT_TOKENS = 101
SHARED_TOKENS = 48
"""Tokens that a prompt has in common with others."""
PREFIXES = 64
OUTPUT_TOKENS = 4
ANSWER_S = 60.0
MOST_OPEN = 64
"""Requests that are open at once: a router that cannot keep up gets them as fast as it answers."""
FLEET, SLOWEST, LATEST = "fleet", "requests?order=slowest", "requests?order=latest"
CALLS: Sequence[tuple[str, float]] = ((FLEET, 1.0), (SLOWEST, 2.0), (LATEST, 2.0))
"""What pages ask for, and the seconds between two calls, as `router/console/static` has them."""


class Connection:
    """One connection, over which one call is made after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, address: str) -> Connection:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 20))

    async def call(self, request: bytes) -> int:
        """Returns the bytes of the body. Raises PeerLost for any status but 200."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise PeerLost(f"the router answers {head[:60]!r}")
        length = int(head.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        return len(await self._reader.readexactly(length))

    def close(self) -> None:
        self._writer.close()


@dataclass(slots=True)
class Requests:
    """Requests that come at a fixed rate, or as fast as a router that cannot keep up answers them."""

    served: Served
    answered_s: list[float] = field(default_factory=list)
    """Seconds of each answer since the last look."""
    _idle: collections.deque[Connection] = field(default_factory=collections.deque)
    _sent: int = 0

    async def run(self, per_minute: float) -> None:
        """Sends until it is cancelled. Raises PeerLost where a request fails."""
        due_s, period_s, may_open = time.perf_counter(), 60.0 / per_minute, asyncio.Semaphore(MOST_OPEN)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await may_open.acquire()
                    self._sent += 1
                    group.create_task(self._ask(self._sent)).add_done_callback(lambda _: may_open.release())
                    now_s = time.perf_counter()
                    due_s = max(due_s + period_s, now_s - MOST_OPEN * period_s)
                    await asyncio.sleep(due_s - now_s)
        finally:
            for connection in self._idle:
                connection.close()

    def take(self) -> list[float]:
        """Returns the seconds of the answers since the last call."""
        taken, self.answered_s = self.answered_s, []
        return taken

    async def _ask(self, number: int) -> None:
        body = json.dumps({"model": MODEL, "prompt": _prompt(number), "max_tokens": OUTPUT_TOKENS, "ignore_eos": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self.served.address}\r\ncontent-type: application/json\r\n"
        begun_s = time.perf_counter()
        connection = self._idle.pop() if self._idle else await Connection.to(self.served.address)
        try:
            async with asyncio.timeout(ANSWER_S):
                await connection.call(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        except TimeoutError:
            raise PeerLost(f"the router has not answered a request within {ANSWER_S:g} s") from None
        finally:
            self._idle.append(connection)
        self.answered_s.append(time.perf_counter() - begun_s)


class Pages:
    """Pages that are open while the block runs. Each has a view of its own and calls as that view does."""

    def __init__(self, served: Served, count: int) -> None:
        self._served = served
        self._count = count
        self.calls = 0
        self.most_bytes = 0
        """Bytes of the largest answer."""

    async def __aenter__(self) -> Pages:
        self._tasks = [
            asyncio.create_task(self._look(*CALLS[rank % len(CALLS)], rank / self._count))
            for rank in range(self._count)
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look(self, call: str, period_s: float, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        connection = await Connection.to(self._served.address)
        request = f"GET /console/api/{call} HTTP/1.1\r\nhost: {self._served.address}\r\n"
        key = f"authorization: Bearer {self._served.key}\r\n\r\n"
        try:
            while True:
                size = await connection.call((request + key).encode())
                self.calls, self.most_bytes = self.calls + 1, max(self.most_bytes, size)
                await asyncio.sleep(period_s)
        finally:
            connection.close()


def _prompt(number: int) -> list[int]:
    """Returns token ids (bytes) of which the first ones are common to many prompts."""
    shared = [1 + (number % PREFIXES * SHARED_TOKENS + place) % 255 for place in range(SHARED_TOKENS)]
    own = [1 + (number >> 8 * (place % 3)) % 255 for place in range(PROMPT_TOKENS - SHARED_TOKENS)]
    return shared + own
