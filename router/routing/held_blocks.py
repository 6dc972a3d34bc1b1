"""The blocks that one epoch of one worker holds, with their places, and snapshots of them that are made in parts.

A snapshot is the set as of one moment. It visits the buckets while the set may change: of each block that changes in a
bucket that it has not reached, it keeps what that was before. So neither a part nor a change takes longer where there
are more blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.events import TierChange
from twostroke.kv_cache.tier import PLACES

BUCKETS = 64
"""Parts of the set, by the first bits of the hash: with two million blocks, one is read in some milliseconds."""


class HeldBlocks:
    def __init__(self) -> None:
        self.buckets: tuple[dict[BlockHash, int], ...] = tuple({} for _ in range(BUCKETS))
        """Hash to places (`PLACES`), one bit each, by the first bits of the hash. A dict is never less than a third
        full, a set down to a seventh; and Python keeps these numbers anyway. Whoever changes one calls `keep` before,
        if there are `readers`."""
        self.readers: list[FrozenBlocks] = []
        """Snapshots that are under way."""

    def __bool__(self) -> bool:
        return any(self.buckets)

    def keep(self, block_hash: BlockHash, places: int) -> None:
        """Lets snapshots keep a block as it is (0: not there) before it changes."""
        for reader in self.readers:
            reader.keep(block_hash, places)

    def on(self, place_number: int) -> Iterator[BlockHash]:
        here = 1 << place_number
        return (block_hash for bucket in self.buckets for block_hash, places in bucket.items() if places & here)

    def take_out(self, most: int) -> Iterator[tuple[BlockHash, int]]:
        """Removes blocks one after the other, at most this many, and yields each with its place."""
        for bucket in self.buckets:
            while bucket and most > 0:
                block_hash, places = bucket.popitem()
                if self.readers:
                    self.keep(block_hash, places)
                most -= 1
                yield block_hash, places

    def freeze(self, place_numbers: Sequence[int]) -> FrozenBlocks:
        """Returns the blocks in these places as they are now; removes it from `readers` after use."""
        frozen = FrozenBlocks(self.buckets, place_numbers)
        self.readers.append(frozen)
        return frozen


class FrozenBlocks:
    """The blocks of one worker as of one moment, bucket by bucket."""

    def __init__(self, buckets: Sequence[dict[BlockHash, int]], place_numbers: Sequence[int]) -> None:
        self._buckets = buckets
        self._place_numbers = place_numbers
        self._next = 0
        """The first bucket that was not handed out."""
        self._kept: defaultdict[int, dict[BlockHash, int]] = defaultdict(dict)
        """Places of blocks that have changed since, as they were, by bucket."""

    def keep(self, block_hash: BlockHash, places: int) -> None:
        bucket = block_hash[0] % BUCKETS
        if bucket >= self._next:
            self._kept[bucket].setdefault(block_hash, places)

    def pieces(self) -> Iterator[TierChange]:
        """Yields all blocks; a bucket is read when its first piece is asked for."""
        while self._next < len(self._buckets):
            kept, bucket = self._kept.pop(self._next, None), self._buckets[self._next]
            blocks = bucket | kept if kept is not None else bucket
            self._next += 1
            for number in self._place_numbers:
                tier, group = PLACES[number]
                here = tuple(each for each, places in blocks.items() if places & 1 << number)
                yield TierChange(tier, here, (), group)
