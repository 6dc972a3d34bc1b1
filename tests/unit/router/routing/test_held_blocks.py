"""Snapshots of a worker's blocks are of one moment, whatever changes while they are read."""

from __future__ import annotations

from router.routing.held_blocks import HeldBlocks
from twostroke.base.ids import BlockHash
from twostroke.kv_cache.tier import PLACES

BLOCK = BlockHash(bytes(16))
"""It lies in the first bucket."""


def test_a_block_that_moves_between_two_changes_is_told_in_one_place() -> None:
    held = HeldBlocks()
    held.buckets[0][BLOCK] = 1 << 0
    changes = held.freeze([0, 1]).pieces()
    first = next(changes)
    assert (first.tier, first.stored) == (PLACES[0][0], (BLOCK,))
    held.keep(BLOCK, held.buckets[0][BLOCK])
    held.buckets[0][BLOCK] = 1 << 1
    assert next(changes).stored == ()
