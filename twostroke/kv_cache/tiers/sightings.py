"""Sightings count how often blocks were seen lately, in bounded memory.

From time to time all counts are halved, as in TinyLFU (Einziger et al., "TinyLFU: a highly efficient cache admission
policy", ACM TOS 2017). So what was seen long ago counts less, and what was seen once is forgotten.
"""

from __future__ import annotations

from twostroke.base.ids import BlockHash

MOST_BLOCKS = 1 << 17
"""Blocks that are counted between two halvings: some 10 MiB."""


class Sightings:
    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._counts: dict[BlockHash, int] = {}

    def saw(self, block_hash: BlockHash) -> None:
        self._counts[block_hash] = self._counts.get(block_hash, 0) + 1
        if len(self._counts) > self._most_blocks:
            self._counts = {each: count // 2 for each, count in self._counts.items() if count > 1}

    def count(self, block_hash: BlockHash) -> int:
        return self._counts.get(block_hash, 0)
