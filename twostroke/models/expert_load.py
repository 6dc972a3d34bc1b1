"""How evenly the experts of a model are used: tokens that each was chosen for. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoad:
    """Counts that the forward pass adds to, and that any thread may read at any time."""

    tokens: npt.NDArray[np.int64]
    """[layers with experts, experts]: tokens that each expert was ever chosen for."""

    def by_expert(self) -> list[int]:
        """Returns the tokens of each expert, over all layers."""
        counts: list[int] = self.tokens.sum(0).tolist()
        return counts

    def imbalance(self) -> float:
        """Returns the load of a layer's busiest expert over the mean of its experts, averaged over all layers; 1
        without tokens.

        If each expert had its own process, a layer would take longer by this factor.
        """
        means = self.tokens.mean(1)
        used = means > 0
        return float((self.tokens.max(1)[used] / means[used]).mean()) if used.any() else 1.0
