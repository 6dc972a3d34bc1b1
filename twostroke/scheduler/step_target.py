"""The longest step in which streams run while prompts wait: what the operator said, or what this device's costs say."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.scheduler.cost import StepCost

USUAL_S = 0.04
"""The target where nothing is known, and the least: a reader does not notice shorter steps."""
SLOWER = 5.0
"""A lone stream may become so many times slower."""
CHAT_TOKENS = 512
"""Tokens that the lone stream attends to."""
NOTICED_S = 0.1
"""Longer steps are noticed. Where a stream's own are that long, they may become twice as long."""


@dataclass(frozen=True, slots=True)
class StepTarget:
    given_s: float | None = None
    """What the operator wants kept, however few prompts wait."""
    limit_s: float | None = None
    """The time between two tokens that was promised."""

    @property
    def is_given(self) -> bool:
        return self.given_s is not None

    def most_s(self, cost: StepCost) -> float:
        """Return the longest step for whatever waits."""
        if self.given_s is not None:
            return self.given_s
        lone_s = cost.of_streams(1, CHAT_TOKENS)
        most_s = min(max(USUAL_S, SLOWER * lone_s), max(NOTICED_S, 2 * lone_s))
        return most_s if self.limit_s is None else min(most_s, self.limit_s)
