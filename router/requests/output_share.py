"""How much of each turn of the event loop output may take, and in which order clients get it.

A step of a hundred choices with twenty logprobs each makes messages for tens of milliseconds. All requests together
have `TURN_S` of a turn; what is left waits for the next turns, client by client, while the loop serves others.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque

TURN_S = 0.004
"""Time for output in one turn of the loop."""
AT_ONCE = 16
"""Waiting messages per turn. Each of the costliest ones takes a third of a millisecond."""


class OutputShare:
    """Shares out the time of one event loop."""

    def __init__(self) -> None:
        self._ends_s: float | None = None
        """When this turn's time ends; None: no message was made in this turn."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting messages by client; the first client is next."""
        self.whole_bodies = asyncio.Lock()
        """Held while a long body is made on a thread: several at once would keep the loop waiting for Python's lock."""

    @property
    def is_over(self) -> bool:
        """Tells whether a message has to wait: the time of this turn is over, or others wait."""
        now_s = time.perf_counter()
        if self._ends_s is None:
            self._ends_s = now_s + TURN_S
            asyncio.get_running_loop().call_soon(self._begin_turn)
            return False
        return bool(self._waiting) or now_s > self._ends_s

    async def turn(self, client: str) -> None:
        """Returns when the client may make its next message."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(waiting)
        await waiting

    def _begin_turn(self) -> None:
        if not self._waiting:
            self._ends_s = None
            return
        for _ in range(AT_ONCE):
            if not self._waiting:
                break
            client, queue = self._waiting.popitem(last=False)
            waiting = queue.popleft()
            if queue:
                self._waiting[client] = queue
            if not waiting.done():  # its client may have left
                waiting.set_result(None)
        self._ends_s = time.perf_counter() + TURN_S
        asyncio.get_running_loop().call_soon(self._begin_turn)
