"""What several viewers ask for is made once, and not more often than the router can spare."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")

PERIOD_S = 0.9
"""Age up to which a value is shown again: pages ask every second, and a little early must not double their period."""
SHARE = 0.005
"""Part of the router's time that one such value may take. A fleet that takes 10 ms to sum up is looked at every 2 s."""


class Shared(Generic[Value]):
    """Made on the event loop, when it is asked for and has aged."""

    def __init__(self, make: Callable[[], Value], clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        self._value: Value | None = None
        self._fresh_until_s = 0.0

    def get(self) -> Value:
        begun_s = self._clock()
        if self._value is None or begun_s >= self._fresh_until_s:
            self._value = self._make()
            ended_s = self._clock()
            self._fresh_until_s = ended_s + max(PERIOD_S, (ended_s - begun_s) / SHARE)
        return self._value
