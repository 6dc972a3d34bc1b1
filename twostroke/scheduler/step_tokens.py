"""How many tokens a step of a CPU may have, from what prompts cost there. Pure values."""

from __future__ import annotations

from twostroke.scheduler.cost import StepCost

MOST_TOKENS = 512
"""Steps of more tokens are hardly faster for each of them."""
LONGEST_S = 0.3
"""A prompt that arrives waits for the step that runs, and so does a stream whose pages arrive meanwhile."""


def tokens_within(cost: StepCost, least: int) -> int:
    """Return `least` tokens, or twice as many, and so on, while a step of one prompt takes at most LONGEST_S.

    Threads wait for each other at the end of every kernel, and between steps: few long steps lose less than many short
    ones.
    """
    tokens = least
    while 2 * tokens <= MOST_TOKENS and 0 < cost.of_prompt(2 * tokens, 0, 2 * tokens) <= LONGEST_S:
        tokens *= 2
    return tokens
