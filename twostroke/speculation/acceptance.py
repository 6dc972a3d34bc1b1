"""How often drafted tokens were right: for each kind of proposal over all answers of a worker, and for each answer."""

from __future__ import annotations

from collections import defaultdict

from twostroke.config import DRAFT_MODEL

PRIOR = 0.5
"""Chance of a token of a kind that was never tried."""
PRIORS = {DRAFT_MODEL: 0.7}
"""The same for kinds that begin higher: an operator names a draft model because it often agrees."""
PRIOR_WEIGHT = 4.0
"""Tokens that the prior chance counts for."""
MEMORY = 512.0
"""Tokens of one kind that are remembered: older ones fade."""
OWN_WEIGHT = 8.0
"""The rate over all answers counts like this many tokens of the answer itself."""
OWN_MEMORY = 32.0
"""Tokens that an answer remembers: what it repeats now says little about what it writes later."""

FADING = 0.9
"""Share of what was seen of a kind that each new answer keeps. A draft model that was often wrong is not run, so
nothing new is seen of it; as the past fades, it is tried again."""


class Rate:
    """A share of right tokens. Older tokens count less and less."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.right = 0.0
        self.tried = 0.0

    def observe(self, is_right: bool) -> None:
        fading = 1.0 - 1.0 / self._memory
        self.right = self.right * fading + is_right
        self.tried = self.tried * fading + 1.0

    def fade(self, share: float) -> None:
        """Keeps a share of what was seen."""
        self.right *= share
        self.tried *= share

    def blended(self, chance: float, weight: float) -> float:
        """Returns the share of right tokens, as if `weight` more tokens had been right with `chance`."""
        return (self.right + weight * chance) / (self.tried + weight)


class Acceptance:
    """What a worker has seen of each kind of proposal."""

    def __init__(self) -> None:
        self._kinds: defaultdict[str, Rate] = defaultdict(lambda: Rate(MEMORY))

    def chance(self, kind: str) -> float:
        """Returns the chance that one token of this kind is right, if those before it are."""
        return self._kinds[kind].blended(PRIORS.get(kind, PRIOR), PRIOR_WEIGHT)

    def observe(self, kind: str, is_right: bool) -> None:
        self._kinds[kind].observe(is_right)

    def fade(self, kind: str) -> None:
        """Lets what was seen of a kind count less. It is called when an answer begins."""
        self._kinds[kind].fade(FADING)
