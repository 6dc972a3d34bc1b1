"""What one shared cache would find: by hand, and against everything that could be forgotten."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from tools.simulate.traces.formats import TraceRow
from tools.simulate.traces.oracle import LeastRecent, found_in_turns, oracle_rate
from tools.simulate.traces.trace import Trace

BLOCK = 10


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


def _next_uses(requests: Sequence[Sequence[int]]) -> list[list[int]]:
    """For every block of every request, the number of the next request that has it."""
    coming: dict[int, int] = {}
    uses = []
    for at in range(len(requests) - 1, -1, -1):
        uses.append([coming.get(block, len(requests)) for block in requests[at]])
        coming.update(dict.fromkeys(requests[at], at))
    return uses[::-1]


def trace_of(*requests: Sequence[int], tail: int = 0) -> Trace:
    rows = (
        TraceRow(float(at), BLOCK * len(blocks) + tail, 1, (*blocks, *((10**6 + at,) if tail else ())))
        for at, blocks in enumerate(requests)
    )
    return Trace("by hand", BLOCK, tuple(rows))


def test_only_full_blocks_hit() -> None:
    trace = trace_of([1, 2], [1, 2], tail=5)
    assert found_in_turns(trace, [LeastRecent(100)]) == [0, 20]
    assert oracle_rate(trace, 100) == 20 / 50


def test_a_hit_ends_at_the_first_block_that_is_missing() -> None:
    assert found_in_turns(trace_of([1, 2, 3], [1, 9, 3]), [LeastRecent(100)]) == [0, 10]


def test_leaves_go_before_their_parents_and_the_oldest_first() -> None:
    trace = trace_of([1, 2, 3], [7], [1, 2, 3])
    assert found_in_turns(trace, [LeastRecent(3)]) == [0, 0, 20]
    assert found_in_turns(trace_of([1], [2], [3], [1]), [LeastRecent(2)]) == [0, 0, 0, 0]


def test_whoever_knows_the_future_keeps_what_comes_again() -> None:
    trace = trace_of([1], [2], [3], [1], [2])
    assert sum(found_in_turns(trace, [LeastRecent(2)])) == 0
    assert sum(found_in_turns(trace, [Farthest(2, [[1], [2], [3], [1], [2]])])) == 20, (
        "3 never comes again: it need not be kept"
    )


def test_caches_in_turns_find_what_their_own_past_holds() -> None:
    trace = trace_of([1], [1], [1], [1])
    assert sum(found_in_turns(trace, [LeastRecent(5)])) == 30
    assert sum(found_in_turns(trace, [LeastRecent(5), LeastRecent(5)])) == 20


@pytest.mark.parametrize("seed", range(12))
def test_no_way_to_forget_single_blocks_beats_the_one_that_knows_the_future(seed: int) -> None:
    draws = random.Random(seed)
    requests = [draws.randrange(5) for _ in range(9)]
    trace = trace_of(*([block] for block in requests))
    capacity = 2
    found = found_in_turns(trace, [Farthest(capacity, [[block] for block in requests])])
    assert sum(found) == BLOCK * _most_hits(tuple(requests), frozenset(), capacity)
    assert sum(found) >= sum(found_in_turns(trace, [LeastRecent(capacity)]))


def _most_hits(requests: tuple[int, ...], held: frozenset[int], capacity: int) -> int:
    """Over every choice of what to forget."""
    if not requests:
        return 0
    first, rest = requests[0], requests[1:]
    after = held | {first}
    kept = [after] if len(after) <= capacity else [frozenset(each) for each in combinations(after, capacity)]
    return (first in held) + max(_most_hits(rest, each, capacity) for each in kept)
