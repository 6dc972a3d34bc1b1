"""Prompt lookup: what came after the last tokens when they were there before, in the prompt or in the answer.

After "Prompt Lookup Decoding" (Saxena, 2023). Answers that edit, quote or sum up their prompt repeat long parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.speculation.draft import Proposal

MATCHED = (8, 4, 2)
"""Lengths of the last tokens that are looked up, the longest first: the more agree, the more often the next one does
too."""
MOST_INDEXED = 4096
"""Tokens that one call adds to the index: a long prompt is taken in over several steps, half a millisecond each."""


class PromptLookup:
    def __init__(self) -> None:
        self._places: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in MATCHED}
        """Index of the token behind each run of so many tokens, where that stood last."""
        self._indexed = 0
        """Tokens of which the runs that end before them are indexed."""

    def propose(self, known: Sequence[int], most: int) -> Proposal | None:
        self._index(known)
        for length in MATCHED:
            if len(known) <= length:
                continue
            place = self._places[length].get(tuple(known[-length:]))
            if place is not None:
                return Proposal(_repeated(known, place, most), f"lookup {length}")
        return None

    def _index(self, known: Sequence[int]) -> None:
        end = min(len(known), self._indexed + MOST_INDEXED)
        for length in MATCHED:
            first = max(self._indexed, length)
            if first >= end:
                continue
            tokens = known[first - length : end - 1]
            runs = zip(*(tokens[offset:] for offset in range(length)), strict=False)
            self._places[length].update(zip(runs, range(first, end), strict=True))
        self._indexed = end


def _repeated(known: Sequence[int], place: int, most: int) -> tuple[int, ...]:
    """Return the tokens from `place` on, over and over where they end before `most`: a loop goes on as it did."""
    tokens = list(known[place : place + most])
    period = len(known) - place
    while len(tokens) < most:
        tokens.append(tokens[len(tokens) - period])
    return tuple(tokens)
