"""Listening with a limit: for how long somebody is silent, not counting time in which the listener was late itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Heard = TypeVar("Heard")

TICK_S = 0.1
"""Silence is counted in steps of this length, however late each of them ends: a listener that was frozen, or kept from
its event loop, has heard nothing of what was said meanwhile and must not blame the speaker."""


async def within(saying: Awaitable[Heard], silence_s: float) -> Heard:
    """What is said, or TimeoutError once it could have been heard for `silence_s` and was not."""
    listening = asyncio.ensure_future(saying)
    left_s = silence_s
    try:
        while left_s > 0 and not listening.done():
            step_s = min(TICK_S, left_s)
            await asyncio.wait((listening,), timeout=step_s)
            left_s -= step_s
        if listening.done():
            return listening.result()
        raise TimeoutError(f"nothing was said for {silence_s:g} s")
    finally:
        if not listening.done():
            listening.cancel()
            await asyncio.wait((listening,))
