"""What several viewers ask for is made once, and not more often than the router can spare."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from starlette.responses import JSONResponse

Value = TypeVar("Value")

PERIOD_S = 0.9
"""Age up to which a value is shown again: pages ask every second, and a little early must not double their period."""
SHARE = 0.002
"""Part of the router's time that one such value may take: with three of them, less than a hundredth. A fleet that takes
5 ms to sum up is looked at every 2.5 s."""


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


def rendered(said: Mapping[str, Any]) -> bytes:
    """Returns an answer of the console's API as JSON: several viewers get the same bytes."""
    return bytes(JSONResponse(said).body)
