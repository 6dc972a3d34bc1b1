"""Drafters of a simulated worker: their tokens are right by seeded draws, and the live scheduler says how many run.

Every token of a simulated answer is `TOKEN`, so a drafted one is right where it is that, too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from tools.simulate.fleet.shape import DraftShape, FleetShape
from tools.simulate.fleet.worker.steps import TOKEN
from twostroke.config import Role
from twostroke.scheduler.cost import StepCost, StepTerms, StreamStep
from twostroke.scheduler.drafting import draft_lengths
from twostroke.speculation.acceptance import Acceptance
from twostroke.speculation.draft import Draft, Proposal
from twostroke.speculation.speculation import MOST_DRAFTED, Speculation

WRONG = 1
"""A drafted token that is not sampled."""
KIND = "simulated"


class SimulatedDrafter:
    """Proposes as many tokens as may run, of which the first ones are right."""

    def __init__(self, shape: DraftShape, draws: random.Random) -> None:
        self._shape = shape
        self._draws = draws

    def propose(self, known: Sequence[int], most: int) -> Proposal | None:
        draws, shape = self._draws, self._shape
        if draws.random() >= shape.share:
            return None
        right = sum(1 for _ in itertools.takewhile(lambda rank: draws.random() < shape.chance(rank), range(most)))
        return Proposal((TOKEN,) * right + (WRONG,) * (most - right), KIND)


class SimulatedDrafts:
    """Speculation of one decode worker's answers; what is seen of it is the worker's, as it is live."""

    def __init__(self, shape: DraftShape, seed: str) -> None:
        self._drafter = SimulatedDrafter(shape, random.Random(seed))
        self._acceptance = Acceptance()

    def speculation(self) -> Speculation:
        return Speculation([self._drafter], self._acceptance)


def drafts_of(shape: FleetShape, role: Role, worker: str) -> SimulatedDrafts | None:
    """Return what a worker drafts; None where it does not."""
    if role is not Role.DECODE or shape.drafts is None:
        return None
    return SimulatedDrafts(shape.drafts, f"{shape.seed} drafts {worker}")


def lone_stream_step(shape: DraftShape, cost: StepCost) -> StreamStep:
    """Return what a step with one stream does for it, on average, where the chances of drafts are known."""
    ranks = range(MOST_DRAFTED)
    chances = tuple(itertools.accumulate((shape.chance(rank) for rank in ranks), lambda all_of, one: all_of * one))
    (length,) = draft_lengths([Draft((TOKEN,) * len(chances), chances)], cost, StepTerms(1), MOST_DRAFTED)
    return StreamStep(1.0 + shape.share * length, 1.0 + shape.share * sum(chances[:length]))
