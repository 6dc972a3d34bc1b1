"""Computes for all workers at once after how many blocks each can continue, given its pages of the further group.

A worker continues after the deepest block before which it holds all pages and, in the further group, those of the last
`tail_blocks` blocks. Checking dozens of workers block by block would take too long for every request. So the holders of
each block are one mask, and the holders of a run of blocks are the "and" of these masks. All blocks are divided into
pieces of `tail_blocks`. A run lies in at most two pieces. Each piece is combined once from both ends (van Herk 1992).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate
from operator import and_

Mask = int
"""A set of holders: one bit each."""


def deepest_of_all(
    pages: Iterable[tuple[int, Mask]], tail_blocks: int, parts: Callable[[int], Mask]
) -> list[tuple[int, Mask]]:
    """Returns (depth, workers that can continue there), the deepest first. Workers that can continue nowhere are left
    out.

    `pages` pairs a number of leading blocks with the workers that hold their pages. `parts` returns the workers that
    hold a block's page of the further group. It takes a few operations on masks for each block, or a few in all if
    the workers hold the last of these pages.
    """
    reaching = sorted(pages)
    runs = _runs(parts, tail_blocks, reaching[-1][0] if reaching else 0)
    found, waiting, depth = list[tuple[int, Mask]](), 0, 0
    while reaching or waiting:
        if not waiting:
            depth = reaching[-1][0]
        while reaching and reaching[-1][0] == depth:
            waiting |= reaching.pop()[1]
        if depth <= 0:
            break
        here = waiting & runs(depth)
        if here:
            found.append((depth, here))
            waiting ^= here
        depth -= 1
    return found


def _runs(parts: Callable[[int], Mask], length: int, blocks: int) -> Callable[[int], Mask]:
    """Returns a function of a depth: the holders of the further pages of all `length` blocks before it."""

    @cache
    def piece(number: int) -> tuple[list[Mask], list[Mask]]:
        """Returns two lists by n: the holders of a piece's first n blocks, and of its blocks from the n-th on."""
        masks = [parts(block) for block in range(number * length, min((number + 1) * length, blocks))]
        return [*accumulate(masks, and_, initial=-1)], [*accumulate(reversed(masks), and_, initial=-1)][::-1]

    def holders(depth: int) -> Mask:
        number, over = divmod(depth, length)
        mask = piece(number - 1)[1][over] if number else -1
        return mask & piece(number)[0][over] if over else mask

    return holders
