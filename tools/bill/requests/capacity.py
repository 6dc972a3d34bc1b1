"""Hit rate of a log against the pool's capacity: least recently used, and the optimum.

Both count as an engine counts: full blocks from the first one up to the first that is missing. A request is over before
the next one comes, so pages of requests that overlap are not held. One pool sees all requests. For a fleet this is what
its pools could find together, if every request went where its blocks are.

Least recently used, leaf before parent, is a stack algorithm (Mattson 1970): of two pools the larger one holds all that
the smaller one holds. So one pass gives the hits of all capacities. Blocks that one request used last stay together in
that stack, a suffix of its chain. So the stack is counted per request and not per block.

The optimum evicts what is used again last (Belady 1966). A parent is used whenever its child is. So among blocks with
the same next use the deepest is evicted first. A real pool could hold the same blocks. No pool finds more, not
even one that may leave a block out: the bound is exact for requests that come one after the other.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.bill.requests.chains import RequestChain, RequestChains

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LruHits:
    """Hits of a pool that evicts the least recently used leaf, for all capacities."""

    by_blocks: Counts
    """At index c the hits in blocks with room for c blocks; with more room than the last index they stay the same."""

    def at(self, capacity_blocks: int) -> int:
        return int(self.by_blocks[min(capacity_blocks, len(self.by_blocks) - 1)])

    @property
    def most(self) -> int:
        """Hits of a pool that never evicts."""
        return int(self.by_blocks[-1])


def least_recently_used(requests: RequestChains) -> LruHits:
    """Counts the hits of all capacities in one pass."""
    last = [-1] * requests.block_count
    stack = _Stack(len(requests.chains))
    begins, ends = [0], [0]
    for index, chain in enumerate(requests.chains):
        for request, count in _runs(last, chain.blocks[: chain.looked_up]):
            above = stack.above(request)
            begins.append(above)
            ends.append(above + count)
        for request, count in _runs(last, chain.blocks):
            stack.add(request, -count)
        for block in chain.blocks:
            last[block] = index
        stack.add(index, chain.length)
    most = max(ends)
    rises = np.bincount(begins, minlength=most + 1) - np.bincount(ends, minlength=most + 1)
    gained = np.cumsum(rises)[:most]  # hits of the capacity c + 1 that the capacity c does not have
    return LruHits(np.concatenate((np.zeros(1, np.int64), np.cumsum(gained))))


def _runs(request_of: Sequence[int], blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields each request with the number of neighbouring blocks that `request_of` gives it.

    Stops at the first block without one.
    """
    for request, run in itertools.groupby(blocks, key=request_of.__getitem__):
        if request < 0:
            return
        yield request, len(list(run))


class _Stack:
    """Blocks per request that used them last, in a tree of partial sums (Fenwick 1994)."""

    def __init__(self, requests: int) -> None:
        self._sums = [0] * (requests + 1)
        self._total = 0

    def add(self, request: int, count: int) -> None:
        self._total += count
        index = request + 1
        while index < len(self._sums):
            self._sums[index] += count
            index += index & -index

    def above(self, request: int) -> int:
        """Returns how many blocks were used last by later requests."""
        upto, index = 0, request + 1
        while index:
            upto += self._sums[index]
            index -= index & -index
        return self._total - upto


class Optimum:
    """Hits of a pool that knows the future, for one capacity at a time."""

    def __init__(self, requests: RequestChains) -> None:
        self._chains = requests.chains
        self._next_uses = _next_uses(requests)

    def hits(self, capacity_blocks: int) -> int:
        """Returns the hits in blocks."""
        held = [0] * len(self._chains)
        """Blocks in the pool by the request that uses them next: a prefix of that request's blocks once it comes."""
        farthest: list[int] = []
        total = found = 0
        for index, (chain, next_uses) in enumerate(zip(self._chains, self._next_uses, strict=True)):
            found += min(held[index], chain.looked_up)
            total -= held[index]
            held[index] = 0
            for request, count in next_uses:
                if not held[request]:
                    heapq.heappush(farthest, -request)
                held[request] += count
                total += count
            while total > capacity_blocks:
                request = -farthest[0]
                dropped = min(held[request], total - capacity_blocks)
                held[request] -= dropped
                total -= dropped
                if not held[request]:
                    heapq.heappop(farthest)
        return found


def _next_uses(requests: RequestChains) -> list[list[tuple[int, int]]]:
    """Returns for each request which later ones use its blocks next, each with how many; the others never come back."""
    next_use = [-1] * requests.block_count
    found: list[list[tuple[int, int]]] = []
    for at, chain in reversed(list(enumerate(requests.chains))):
        found.append(list(_runs(next_use, chain.blocks)))
        for block in chain.blocks:
            next_use[block] = at
    return found[::-1]


def capacities(requests: RequestChains, points: int) -> tuple[int, ...]:
    """Returns capacities in blocks for a curve: powers of one factor, up to where nothing more is found."""
    most = max(1, distinct_blocks(requests.chains))
    return tuple(sorted({round(most ** (step / (points - 1))) for step in range(points)}))


def distinct_blocks(chains: Sequence[RequestChain]) -> int:
    """Returns how many blocks a pool that never evicts ends with."""
    shared = {block for chain in chains for block in chain.blocks}
    return len(shared) + sum(chain.length - len(chain.blocks) for chain in chains)
