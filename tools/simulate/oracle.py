"""The best that placement could do: the hits of one cache that has all workers' pages and sees every request in turn.

Hits are counted as an engine counts: full blocks only, from the first one up to the first that is missing. A request is
over before the next one comes; a real fleet's requests overlap, and its copies of one block take several pages.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tools.simulate.traces.formats import TraceRow
from tools.simulate.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Hits:
    hit_tokens: int
    input_tokens: int

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


class Cache(Protocol):
    def __contains__(self, block: int) -> bool: ...

    def use(self, blocks: Sequence[int], at: int) -> None:
        """All of a request's, which is the trace's `at`-th; those that are missing come in, others may have to go."""


class LeastRecent:
    """Forgets what was used longest ago; of one request, its last blocks first: leaf before parent."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, blocks: Sequence[int], at: int) -> None:
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class Farthest:
    """Forgets what is used again last, or never (Belady 1966): no cache that does not know the future is better."""

    def __init__(self, capacity_blocks: int, requests: Sequence[Sequence[int]]) -> None:
        self._capacity = capacity_blocks
        self._next_use = _next_uses(requests)
        self._held: dict[int, int] = {}
        self._farthest: list[tuple[int, int, int]] = []
        """(minus next use, minus depth in its request, block); entries that `_held` contradicts are stale."""

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def use(self, blocks: Sequence[int], at: int) -> None:
        for depth, (block, next_use) in enumerate(zip(blocks, self._next_use[at], strict=True)):
            self._held[block] = next_use
            heapq.heappush(self._farthest, (-next_use, -depth, block))
        while len(self._held) > self._capacity:
            next_use, _, block = heapq.heappop(self._farthest)
            if self._held.get(block) == -next_use:
                del self._held[block]


def hits_of(trace: Trace, cache: Cache) -> Hits:
    """With one cache for all rows, in their order."""
    return hits_in_turns(trace, [cache])


def hits_in_turns(trace: Trace, caches: Sequence[Cache]) -> Hits:
    """With caches that take turns: what round-robin finds if every request ends before its cache's next one."""
    return Hits(sum(found_in_turns(trace, caches)), sum(row.input_tokens for row in trace.rows))


def found_in_turns(trace: Trace, caches: Sequence[Cache]) -> list[int]:
    """Tokens of every row that its cache has."""
    found = []
    for at, row in enumerate(trace.rows):
        cache, blocks = caches[at % len(caches)], full_blocks(row, trace.block_tokens)
        found.append(
            trace.block_tokens * next((n for n, block in enumerate(blocks) if block not in cache), len(blocks))
        )
        cache.use(blocks, at)
    return found


def oracle(trace: Trace, capacity_blocks: int, *, knows_the_future: bool = False) -> Hits:
    if knows_the_future:
        return hits_of(trace, Farthest(capacity_blocks, [full_blocks(row, trace.block_tokens) for row in trace.rows]))
    return hits_of(trace, LeastRecent(capacity_blocks))


def full_blocks(row: TraceRow, block_tokens: int) -> tuple[int, ...]:
    return row.blocks[: row.input_tokens // block_tokens]


def _next_uses(requests: Sequence[Sequence[int]]) -> list[list[int]]:
    """For every block of every request, the number of the next request that has it."""
    coming: dict[int, int] = {}
    uses = []
    for at in range(len(requests) - 1, -1, -1):
        uses.append([coming.get(block, len(requests)) for block in requests[at]])
        coming.update(dict.fromkeys(requests[at], at))
    return uses[::-1]
