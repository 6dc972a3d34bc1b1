"""Which chains of cached blocks are worth most to whoever takes over. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from twostroke.ids import BlockName
from twostroke.kv_cache.pool import CachedBlock


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks that follow one another."""

    root: BlockName
    """What the first of them follows."""
    names: tuple[BlockName, ...]
    fresh: int
    """How many of them no chain before this one has."""

    def cut(self, fresh: int) -> Chain:
        """Without its last blocks, so that no more than so many are fresh."""
        return self if fresh >= self.fresh else Chain(self.root, self.names[: fresh - self.fresh], fresh)


def hottest_chains(cached: Iterable[CachedBlock]) -> Iterator[Chain]:
    """Every cached block, in chains that are as long as they get, the most recently used first."""
    by_name = {block.name: block for block in cached}
    parents = {block.parent for block in by_name.values()}
    last_ones = [block for block in by_name.values() if block.name not in parents]
    told: set[BlockName] = set()
    for last in sorted(last_ones, key=lambda block: -block.last_used):
        chain, seen = [last], {last.name}
        # Parents are what others said they are: a circle ends where it closes.
        while (parent := by_name.get(chain[-1].parent)) is not None and parent.name not in seen:
            chain.append(parent)
            seen.add(parent.name)
        names = tuple(block.name for block in reversed(chain))
        yield Chain(chain[-1].parent, names, sum(name not in told for name in names))
        told.update(names)
