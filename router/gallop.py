"""How far each holder's hold on a sequence reaches, without looking at every position.

Holders of position i + 1 nearly always hold position i, so the set of holders only shrinks along the sequence, and
where it shrinks is found by doubling steps and halving intervals (exponential search, Bentley and Yao 1976): a few
looks per holder that drops out, not one per position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Mask = int
"""A set of holders: one bit each."""


def gallop(holders: Callable[[int], Mask], length: int) -> dict[Mask, int]:
    """Bit of each holder of position 0 -> first position that it does not hold.

    Exact where every holder holds a prefix of the sequence. Of one with a hole, the answer lies at the hole or past
    it: the hole itself may be jumped over.
    """
    depths: dict[Mask, int] = {}
    alive = holders(0) if length else 0
    position = 0
    """All of `alive` hold this position."""
    while alive:
        lost_at = _first_loss(holders, alive, position, length)
        still = alive & holders(lost_at) if lost_at < length else 0
        for bit in bits(alive & ~still):
            depths[bit] = lost_at
        alive, position = still, lost_at
    return depths


def bits(mask: Mask) -> Iterable[Mask]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _first_loss(holders: Callable[[int], Mask], alive: Mask, position: int, length: int) -> int:
    """The first position after `position` that some of `alive` lack."""
    step, low, high = 1, position, length
    while low + step < length:
        if alive & ~holders(low + step):
            high = low + step
            break
        low += step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if alive & ~holders(middle):
            high = middle
        else:
            low = middle
    return high
