"""How far each holder's hold on a sequence reaches, without looking at every position.

Holders of position i + 1 nearly always hold position i, so the set of holders only shrinks along the sequence. One walk
in doubling steps (exponential search, Bentley and Yao 1976) brackets where it shrinks, for all holders at once; then
only intervals whose ends differ are halved. That is about log n looks, and log of the bracket for each place where
holders drop out, not one look per position.
"""

from __future__ import annotations

from collections.abc import Callable

Mask = int
"""A set of holders: one bit each."""


def gallop(holders: Callable[[int], Mask], length: int) -> list[tuple[int, Mask]]:
    """Where holders of position 0 drop out: (first position that they do not hold, who). Of others nothing is said.

    Exact where every holder holds a prefix of the sequence. Of one with a hole the answer lies at the hole or past it:
    the hole itself may be jumped over.
    """
    losses: list[tuple[int, Mask]] = []
    low, at_low, step = 0, holders(0) if length else 0, 1
    while at_low:
        high = min(low + step, length)
        at_high = at_low & holders(high) if high < length else 0
        if at_high != at_low:
            _halve(holders, (low, at_low, high, at_high), losses)
        low, at_low, step = high, at_high, 2 * step
    return losses


def _halve(
    holders: Callable[[int], Mask], bracket: tuple[int, Mask, int, Mask], losses: list[tuple[int, Mask]]
) -> None:
    """All losses after its lower end, up to its upper one."""
    brackets = [bracket]
    while brackets:
        low, at_low, high, at_high = brackets.pop()
        if high - low == 1:
            losses.append((high, at_low & ~at_high))
            continue
        middle = (low + high) // 2
        at_middle = at_low & holders(middle) | at_high
        if at_middle != at_high:
            brackets.append((middle, at_middle, high, at_high))
        if at_low != at_middle:
            brackets.append((low, at_low, middle, at_middle))
