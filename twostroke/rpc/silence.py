"""Listening with a limit: for how long a peer is silent, without time in which the listener was late itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

TICK_S = 0.1
"""Seconds of one step in which silence is counted, however late the step ends. A listener that was frozen, or kept from
its event loop, heard nothing of what was sent meanwhile, and must not blame the sender."""


@contextlib.asynccontextmanager
async def listening(silence_s: float) -> AsyncGenerator[Callable[[], None], None]:
    """Yields a function that the block calls whenever it hears something. The block ends with TimeoutError after
    `silence_s` in which it could have heard something and did not.
    """
    loop = asyncio.get_running_loop()
    left_s = silence_s
    timer: asyncio.TimerHandle | None = None

    def heard() -> None:
        nonlocal left_s
        left_s = silence_s

    def tick() -> None:
        nonlocal left_s, timer
        left_s -= TICK_S
        if left_s > 0:
            timer = loop.call_later(TICK_S, tick)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(TICK_S, tick)
        try:
            yield heard
        finally:
            timer.cancel()
