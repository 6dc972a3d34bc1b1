"""What a worker does between two steps: nothing, unless a feature has something to do there."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol


class BetweenSteps(Protocol):
    """Work between two steps, which the next one waits for."""

    def begin(self) -> Awaitable[None] | None:
        """Begins it, and returns its end; None where there is nothing to do."""


class NothingBetween:
    """A worker whose steps follow one another at once."""

    def begin(self) -> Awaitable[None] | None:
        return None
