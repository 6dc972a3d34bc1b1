"""Proposes the tokens that the answer's grammar forces. The sampler draws each of them, since nothing else may come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.config.schedule import GRAMMAR_DRAFTER
from twostroke.speculation.draft import Proposal

ForcedRun = Callable[[int], Sequence[int]]
"""Returns up to so many tokens that must come next in an answer, as far as that is known."""


class ForcedTokens:
    def __init__(self, forced_run: ForcedRun) -> None:
        self._forced_run = forced_run

    def propose(self, known: Sequence[int], most: int) -> Proposal | None:
        run = self._forced_run(most)
        return Proposal(tuple(run), GRAMMAR_DRAFTER, is_certain=True) if run else None
