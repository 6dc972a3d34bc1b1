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


def mask_of(bits: bytes) -> Mask | None:
    """Returns the mask of a set of tokens, as `twostroke.request.token_bits` makes it; None for an empty one."""
    return np.frombuffer(bits, np.uint32) if bits else None


def narrowed(mask: Mask, allowed: Mask | None, ends: Sequence[int]) -> Mask:
    """Returns the tokens that a mask permits and that are allowed.

    Where that is none, the permitted end tokens are left: an answer that is complete ends.
    """
    if allowed is None:
        return mask
    both = np.zeros_like(mask)
    size = min(len(mask), len(allowed))
    np.bitwise_and(mask[:size], allowed[:size], out=both[:size])
    if not both.any():
        for token in ends:
            word, bit = divmod(token, WORD_BITS)
            both[word] |= mask[word] & np.uint32(1 << bit)
    return both


def permitted(mask: Mask, size: int) -> npt.NDArray[np.int64]:
    """Returns the ids below `size` that a mask permits, in their order."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=size))


def candidates(mask: Mask, size: int, banned: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns the permitted ids below `size` that are not banned; all permitted ones where each of them is banned.

    So an answer that is complete ends, before its least number of tokens too.
    """
    ids = permitted(mask, size)
    left = ids[~np.isin(ids, banned)] if banned else ids
    return left if len(left) else ids
