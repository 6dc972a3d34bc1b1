"""Bounds the time that parsing HTTP connections may take in one iteration of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

SLICE_S = 0.0005
"""Seconds for parsing in one iteration of the loop, over all connections of a server."""
DRAIN_PERIOD_S = 0.005
"""Seconds between two reads of bytes that are thrown away, over all connections of a server."""

Step = Callable[[], bool]
"""Does a little work. It returns False when there is nothing more to do for now."""


class LoopShare:
    """Connections take turns: each parses one piece, and all together no longer than `SLICE_S` in one iteration."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._drains: deque[Step] = deque()
        self._is_running = False
        self._is_draining = False

    def run(self, step: Step) -> None:
        """Calls `step` until it returns False, between other work of the loop."""
        self._steps.append(step)
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._run)

    def drain(self, read: Step) -> None:
        """Calls `read` once, when its turn comes: it has one more buffer of a refused body received and discarded.

        It returns False where its connection is closing. Then the next one has its turn at once.
        """
        self._drains.append(read)
        if not self._is_draining:
            self._is_draining = True
            asyncio.get_running_loop().call_later(DRAIN_PERIOD_S, self._drain)

    def _run(self) -> None:
        until_s = time.perf_counter() + SLICE_S
        try:
            while self._steps and time.perf_counter() < until_s:
                step = self._steps.popleft()
                if step():
                    self._steps.append(step)
        finally:  # if a step fails, the other connections still have their turns
            if self._steps:
                asyncio.get_running_loop().call_soon(self._run)
            else:
                self._is_running = False

    def _drain(self) -> None:
        try:
            while self._drains and not self._drains.popleft()():
                pass
        finally:
            if self._drains:
                asyncio.get_running_loop().call_later(DRAIN_PERIOD_S, self._drain)
            else:
                self._is_draining = False
