"""How much of each turn of the event loop answers may take, and in which order clients get it.

A step of a hundred choices with twenty logprobs each makes messages for tens of milliseconds. All answers together have
`TURN_S` of a turn; what is left waits for the next ones, client by client, while the loop reads and answers others.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque

TURN_S = 0.004
"""Of one turn of the loop, for messages of answers."""
AT_ONCE = 16
"""Messages of those that waited, per turn. Each of the costliest ones takes a third of a millisecond."""


class OutputShare:
    """Of one event loop."""

    def __init__(self) -> None:
        self._ends_s: float | None = None
        """When this turn's time is over; None: no message was made in this turn."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By client; the first one's turn is next."""
        self.whole_bodies = asyncio.Lock()
        """Held while a long body is made on a thread: each of several would keep the loop waiting for Python's lock."""

    @property
    def is_over(self) -> bool:
        """The time of this turn is over, or others wait: whoever wants to make a message waits for its turn."""
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
