"""Masks: which tokens of a vocabulary may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

WORD_BITS: Final = 32
"""Bits of one word of a mask."""

Mask = npt.NDArray[np.uint32]
"""One bit for each token of the vocabulary, the lowest bit of the first word for token 0: those that may come next."""


def permitted(mask: Mask, size: int) -> npt.NDArray[np.int64]:
    """Returns the ids below `size` that a mask permits, in their order."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=size))


def candidates(mask: Mask, size: int, banned: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns the permitted ids below `size` that are not banned; all permitted ones where each of them is banned.

    So a grammar that has ended ends the answer, before its least number of tokens too.
    """
    ids = permitted(mask, size)
    left = ids[~np.isin(ids, banned)] if banned else ids
    return left if len(left) else ids
