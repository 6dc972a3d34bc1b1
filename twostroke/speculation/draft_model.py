"""Proposes what a draft model drew before the step: a worker runs it between the steps of the model."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.config import DRAFT_MODEL
from twostroke.speculation.draft import Proposal


class ModelDrafter:
    """Holds the drafted tokens of one answer until the answer grows."""

    def __init__(self) -> None:
        self._tokens: tuple[int, ...] = ()
        self._known_tokens = 0

    def has_drafted(self, known: Sequence[int]) -> bool:
        """Returns whether tokens were drafted to come after these."""
        return bool(self._tokens) and self._known_tokens == len(known)

    def drafted(self, known: Sequence[int], tokens: tuple[int, ...]) -> None:
        """Takes what the draft model has drawn to come after `known`."""
        self._tokens, self._known_tokens = tokens, len(known)

    def propose(self, known: Sequence[int], most: int) -> Proposal | None:
        if not self.has_drafted(known) or not most:
            return None
        return Proposal(self._tokens[:most], DRAFT_MODEL)
