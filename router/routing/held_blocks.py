"""The blocks that one epoch of a worker holds, with their places, and snapshots that are read bucket by bucket.

A snapshot is the set at one moment, although the set may change while its buckets are read. When a block changes in a
bucket that was not read yet, the snapshot keeps the block's former places. So no step reads all blocks at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.events import TierChange
from twostroke.kv_cache.tier import PLACES

BUCKETS = 64
"""Parts of the set, by the first bits of the hash: with two million blocks, one is read in some milliseconds."""


class HeldBlocks:
    def __init__(self) -> None:
        self.buckets: tuple[dict[BlockHash, int], ...] = tuple({} for _ in range(BUCKETS))
        """Places of each block by hash, one bit for each of `PLACES`, in buckets by the first bits of the hash. A dict
        takes less memory than sets: it is at least a third full, a set a seventh, and small ints are shared. If there
        are `readers`, call `keep` before changing a block."""
        self.readers: list[FrozenBlocks] = []
        """Snapshots that are being read."""

    def __bool__(self) -> bool:
        return any(self.buckets)

    def keep(self, block_hash: BlockHash, places: int) -> None:
        """Has snapshots keep the places of a block before it changes. 0: it is not held."""
        for reader in self.readers:
            reader.keep(block_hash, places)

    def on(self, place_number: int) -> Iterator[BlockHash]:
        here = 1 << place_number
        return (block_hash for bucket in self.buckets for block_hash, places in bucket.items() if places & here)

    def take_out(self, most: int) -> Iterator[tuple[BlockHash, int]]:
        """Removes at most `most` blocks one after the other, and yields each with its places."""
        for bucket in self.buckets:
            while bucket and most > 0:
                block_hash, places = bucket.popitem()
                if self.readers:
                    self.keep(block_hash, places)
                most -= 1
                yield block_hash, places

    def freeze(self, place_numbers: Sequence[int]) -> FrozenBlocks:
        """Returns a snapshot of the blocks in these places. The caller removes it from `readers` after use."""
        frozen = FrozenBlocks(self.buckets, place_numbers)
        self.readers.append(frozen)
        return frozen


class FrozenBlocks:
    """A snapshot of one worker's blocks, bucket by bucket."""

    def __init__(self, buckets: Sequence[dict[BlockHash, int]], place_numbers: Sequence[int]) -> None:
        self._buckets = buckets
        self._place_numbers = place_numbers
        self._next = 0
        """Index of the first bucket that was not read."""
        self._kept: defaultdict[int, dict[BlockHash, int]] = defaultdict(dict)
        """Former places of blocks that have changed since the snapshot, by bucket."""

    def keep(self, block_hash: BlockHash, places: int) -> None:
        bucket = block_hash[0] % BUCKETS
        if bucket >= self._next:
            self._kept[bucket].setdefault(block_hash, places)

    def pieces(self) -> Iterator[TierChange]:
        """Yields all blocks, for each bucket one change for each place."""
        while self._next < len(self._buckets):
            kept, bucket = self._kept.pop(self._next, None), self._buckets[self._next]
            blocks = bucket | kept if kept is not None else bucket
            self._next += 1
            # Before any is yielded: blocks may move from one place to another between two changes.
            yield from [self._change(blocks, number) for number in self._place_numbers]

    def _change(self, blocks: Mapping[BlockHash, int], place_number: int) -> TierChange:
        tier, group = PLACES[place_number]
        here = tuple(each for each, places in blocks.items() if places & 1 << place_number)
        return TierChange(tier, here, (), group)
