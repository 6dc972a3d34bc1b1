"""Drafters of a simulated worker: their tokens are right by seeded draws, and the live scheduler says how many run.

Every token of a simulated answer is `TOKEN`, so a drafted one is right where it is that, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tools.simulate.fleet.shape import DraftShape, FleetShape
from tools.simulate.fleet.worker.steps import TOKEN
from twostroke.config import Role
from twostroke.scheduler.constraints.drafting import draft_lengths
from twostroke.scheduler.cost import StepCost, StepTerms, StreamStep
from twostroke.speculation.draft import Draft, Proposal
from twostroke.speculation.speculation import Acceptance, Speculation

WRONG = 1
"""A drafted token that is not sampled."""


class SimulatedDrafter:
    """Proposes tokens, with the first ones right: long proposals are those that are right for long."""

    def __init__(self, shape: DraftShape, draws: random.Random) -> None:
        self._shape = shape
        self._draws = draws

    def propose(self, known: Sequence[int], most: int) -> Proposal | None:
        draw = self._draws.random()
        proposed, right = (sum(share > draw for share in of) for of in (self._shape.proposed, self._shape.right))
        length = min(most, proposed)
        right = min(length, right)
        # What a drafter goes by says how sure it is: here, how long its proposals are.
        return Proposal((TOKEN,) * right + (WRONG,) * (length - right), f"length {proposed}") if length else None


def speculation_of(shape: FleetShape, role: Role, worker: str) -> Callable[[], Speculation] | None:
    """Returns what makes the speculation of one answer of a worker; None where it drafts nothing.

    What is seen of acceptance is the worker's, as it is live.
    """
    if role is not Role.DECODE or shape.drafts is None:
        return None
    drafter, acceptance = SimulatedDrafter(shape.drafts, random.Random(f"{shape.seed} drafts {worker}")), Acceptance()
    return lambda: Speculation([drafter], acceptance)


def cost_per_token(shape: FleetShape) -> StepCost:
    """Returns the costs of a fleet's steps, streams for each token that they get.

    Where tokens are drafted, that is what a stream costs that is alone: no more of them are right.
    """
    if shape.drafts is None:
        return shape.cost
    each = lone_stream_step(shape.drafts, shape.cost)
    return shape.cost.with_streams(each).per_token(each.tokens)


def lone_stream_step(shape: DraftShape, cost: StepCost) -> StreamStep:
    """Returns what a step with one stream does for it, on average, where the chances of drafts are known."""
    proposed = shape.proposed
    if not proposed[0]:
        return StreamStep()
    right = [min(pair) for pair in zip(proposed, shape.right, strict=False)]
    chances = tuple(share / proposed[0] for share in right)
    (length,) = draft_lengths([Draft((TOKEN,) * len(chances), chances)], cost, StepTerms(1), len(chances))
    return StreamStep(1.0 + sum(proposed[:length]), 1.0 + sum(right[:length]))
