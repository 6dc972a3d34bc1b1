"""Whether prompts that wait would have their first token later than was promised. Pure values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from twostroke.scheduler.cost import Budget, Queued, StepCost

MARGIN = 1.25
"""A prompt is expected to take this many times its predicted seconds: steps vary, and a first token needs one more."""


@dataclass(frozen=True, slots=True)
class WaitingPrompts:
    """Prompts that wait at one worker, as it reports them to other workers of its host."""

    count: int = 0
    has_late: bool = False
    """Whether some would get their first token later than promised."""
    waiting_s: float = 0.0
    """Seconds that they will wait in sum, if nothing else is computed."""

    @classmethod
    def all_of(cls, several: Iterable[WaitingPrompts]) -> WaitingPrompts:
        """Returns the prompts of several workers."""
        each = list(several)
        late = any(one.has_late for one in each)
        return cls(sum(one.count for one in each), late, sum(one.waiting_s for one in each))


@dataclass(frozen=True, slots=True)
class DuePrompt:
    """What is left of a prompt, and when its first token is due."""

    tokens: int
    """Tokens that this worker computes."""
    pairs: float
    """Pairs of each of them and a token that it attends to."""
    due_s: float | None
    """Time on the worker's clock; None if nothing was promised."""


def waiting_s(prompts: Iterable[DuePrompt], cost: StepCost, step_tokens: int) -> float:
    """Returns the seconds that the prompts wait for their first tokens, in sum, if nothing else is computed."""
    ends_s = itertools.accumulate(
        cost.of_prompts(-(-prompt.tokens // step_tokens), prompt.tokens, prompt.pairs) for prompt in prompts
    )
    return sum(ends_s)


def has_late(prompts: Iterable[DuePrompt], beside: Queued, budget: Budget, step_tokens: int, now_s: float) -> bool:
    """Returns whether a prompt is late if all are computed in turn, beside these streams and within `budget`."""
    tokens, pairs = 0, 0.0
    for prompt in prompts:
        tokens += prompt.tokens
        pairs += prompt.pairs
        if prompt.due_s is not None:
            left_s = budget.drain_s(replace(beside, tokens=tokens, pairs=pairs), step_tokens)
            if now_s + MARGIN * left_s > prompt.due_s:
                return True
    return False
