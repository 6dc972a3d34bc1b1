"""The slots of the window group, how many blocks a token sees, and how deep a prefix is a hit. Plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twostroke.base.ids import PageId


@dataclass(frozen=True, slots=True)
class WindowShape:
    """The slots of the window group, and how many blocks a token sees."""

    first: PageId
    """Id of the first slot: pages of whole blocks have the ids before it."""
    slots: int
    window: int
    """Tokens that a token sees, itself included."""
    block_size: int
    has_exact_blocks: bool = False
    """Whether tokens read their own block exact (int4 pages). Then the last block of a hit may have to run again."""

    @property
    def tail_blocks(self) -> int:
        """Number of last blocks before a block boundary. A sequence needs their window parts to continue from there."""
        seen = self.window + (self.block_size - 1 if self.has_exact_blocks else 0)
        return -(-seen // self.block_size)

    @property
    def least_slots(self) -> int:
        """Slots that one sequence may need: for a tail to pull, a tail to compute from, and new blocks."""
        return 2 * self.tail_blocks + 2

    @property
    def chunk_slots(self) -> int:
        """Slots for the blocks of one chunk: half of the slots beyond `least_slots`, and at least one."""
        return max(1, (self.slots - self.least_slots) // 2)

    @property
    def most_pinned(self) -> int:
        """Most parts that pins may keep: `least_slots` of a sequence and `chunk_slots` of a chunk stay."""
        return max(0, self.slots - self.least_slots - self.chunk_slots)

    def first_block(self, position: int) -> int:
        """Returns the first block that the token at a position sees."""
        return max(0, position - self.window + 1) // self.block_size

    def tail(self, depth: int) -> range:
        """Returns the blocks with window parts that a sequence needs to continue after the first `depth` blocks."""
        return range(max(0, depth - self.tail_blocks), depth)


def deepest(blocks: int, tail_blocks: int, has_part: Callable[[int], bool]) -> int:
    """Returns the largest depth, at most `blocks`, before which each of the last `tail_blocks` blocks has a window
    part.

    Depth 0 needs none, and a depth of less than `tail_blocks` needs all of its blocks.
    """
    depth, block = blocks, blocks - 1
    while block >= 0 and depth - block <= tail_blocks:
        if not has_part(block):
            depth = block
        block -= 1
    return depth
