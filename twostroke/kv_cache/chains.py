"""Chains of cached blocks in order of their worth, for the cache hand-off. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from twostroke.ids import BlockHash
from twostroke.kv_cache.pool import CachedBlock


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks that follow one another."""

    root: BlockHash
    """Parent of the first block."""
    block_hashes: tuple[BlockHash, ...]
    fresh: int
    """Blocks of this chain that no earlier chain has."""

    def cut(self, fresh: int) -> Chain:
        """Return the chain without its last blocks, so that at most `fresh` are fresh."""
        return self if fresh >= self.fresh else Chain(self.root, self.block_hashes[: fresh - self.fresh], fresh)


def hottest_chains(cached: Iterable[CachedBlock]) -> Iterator[Chain]:
    """Yield all cached blocks in chains of maximal length, the most recently used first."""
    by_hash = {block.hash: block for block in cached}
    parents = {block.parent for block in by_hash.values()}
    last_ones = [block for block in by_hash.values() if block.hash not in parents]
    seen_before: set[BlockHash] = set()
    for last in sorted(last_ones, key=lambda block: -block.last_used):
        chain, seen = [last], {last.hash}
        # Parents come from other workers, so there may be a cycle.
        while (parent := by_hash.get(chain[-1].parent)) is not None and parent.hash not in seen:
            chain.append(parent)
            seen.add(parent.hash)
        hashes = tuple(block.hash for block in reversed(chain))
        yield Chain(chain[-1].parent, hashes, sum(block_hash not in seen_before for block_hash in hashes))
        seen_before.update(hashes)
