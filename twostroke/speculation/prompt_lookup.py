"""Prompt lookup: it finds the last tokens earlier in the prompt or the answer, and proposes what followed them there.

After "Prompt Lookup Decoding" (Saxena, 2023). Answers that edit, quote or sum up their prompt repeat long parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twostroke.speculation.draft import Proposal

MATCHED = (8, 4, 2)
"""Numbers of last tokens that are looked for, the largest first. The more agree, the more often the next one agrees."""
REACH = 32_768
"""Tokens before the end that are searched. That takes some tens of microseconds and no index in memory."""
PLACES = 256
"""Most places that are compared further, the last ones. Where one token repeats, every place matches."""


class PromptLookup:
    def __init__(self) -> None:
        self._tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        """The last known tokens, at least REACH of them, and room for more."""
        self._count = 0
        self._known = 0

    def propose(self, known: Sequence[int], most: int) -> Proposal | None:
        self._take_in(known)
        tokens = self._tokens[max(0, self._count - REACH) : self._count]
        places = np.flatnonzero(tokens[:-1] == tokens[-1])[-PLACES:] + 1
        """Places after the earlier runs that agree with the last tokens."""
        found, matched = None, 0
        for length in range(2, MATCHED[0] + 1):
            places = places[places >= length]
            if not len(places):
                break
            places = places[tokens[places - length] == tokens[-length]]
            if length in MATCHED and len(places):
                found, matched = int(places[-1]), length
        if found is None:
            return None
        return Proposal(_repeated(tokens, found, most), f"lookup {matched}")

    def _take_in(self, known: Sequence[int]) -> None:
        new = known[max(self._known, len(known) - REACH) :]
        kept = min(self._count, REACH)
        if self._count + len(new) > len(self._tokens):
            tokens = np.empty(2 * (kept + len(new)), np.int32)
            tokens[:kept] = self._tokens[self._count - kept : self._count]
            self._tokens, self._count = tokens, kept
        self._tokens[self._count : self._count + len(new)] = new
        self._count += len(new)
        self._known = len(known)


def _repeated(tokens: npt.NDArray[np.int32], place: int, most: int) -> tuple[int, ...]:
    """Returns the tokens from `place` on, over and over where they end before `most`: a loop repeats itself."""
    period = tokens[place:].tolist()
    return tuple(period[position % len(period)] for position in range(most))
