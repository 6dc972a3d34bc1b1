"""The longest step in which streams run while prompts wait: set by the operator, or derived from the device's costs."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.scheduler.cost import StepCost

USUAL_S = 0.04
"""The least target in seconds, which also holds while nothing is known: a reader does not notice shorter steps."""
SLOWER = 5.0
"""Factor by which a lone stream may become slower."""
CHAT_TOKENS = 512
"""Tokens that the lone stream attends to."""
NOTICED_S = 0.1
"""Seconds from which on steps are noticed. Beyond them, the target is at most twice the step of a lone stream."""
PLANNED_FRACTION = 0.85
"""Fraction of the promised time between two tokens that steps are planned to take: some take longer than predicted."""


@dataclass(frozen=True, slots=True)
class StepTarget:
    given_s: float | None = None
    """Target that the operator has set. It holds however few prompts wait."""
    limit_s: float | None = None
    """Time between two tokens that was promised."""
    usual_s: float | None = None
    """Target of a device whose costs yield none. It holds however few prompts wait."""

    @property
    def is_fixed(self) -> bool:
        return self.given_s is not None or self.usual_s is not None

    def most_s(self, cost: StepCost) -> float:
        """Returns the longest step for prompts that will not be late."""
        longest_s = self.given_s or self.usual_s or _most_of(cost)
        return longest_s if self.limit_s is None else min(longest_s, PLANNED_FRACTION * self.limit_s)

    def most_for_late_s(self, cost: StepCost) -> float:
        """Returns the longest step while a prompt would be late: streams get what was promised to them."""
        if self.given_s is not None or self.limit_s is None:
            return self.most_s(cost)
        return PLANNED_FRACTION * self.limit_s


def _most_of(cost: StepCost) -> float:
    lone_s = cost.of_streams(1, CHAT_TOKENS)
    return min(max(USUAL_S, SLOWER * lone_s), max(NOTICED_S, 2 * lone_s))
