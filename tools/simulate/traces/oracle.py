"""The best that placement could do: the hits of one cache that has all workers' pages and sees every request in turn.

Hits are counted as an engine counts: full blocks only, from the first one up to the first that is missing. A request is
over before the next one comes; a real fleet's requests overlap, and its copies of one block take several pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from tools.simulate.traces.formats import TraceRow
from tools.simulate.traces.trace import Trace


class Cache(Protocol):
    def __contains__(self, block: int) -> bool: ...

    def use(self, blocks: Sequence[int], at: int) -> None:
        """Uses all blocks of the trace's `at`-th request: missing ones come in, and others may be evicted."""


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


def found_in_turns(trace: Trace, caches: Sequence[Cache]) -> list[int]:
    """Returns the tokens of every row that its cache has, where caches take turns: what round-robin finds if every
    request ends before its cache's next one."""
    found = []
    for index, row in enumerate(trace.rows):
        cache, blocks = caches[index % len(caches)], full_blocks(row, trace.block_tokens)
        found.append(
            trace.block_tokens * next((n for n, block in enumerate(blocks) if block not in cache), len(blocks))
        )
        cache.use(blocks, index)
    return found


def oracle_rate(trace: Trace, capacity_blocks: int) -> float:
    """Returns the share of prompt tokens that one cache for all rows has, in their order."""
    return sum(found_in_turns(trace, [LeastRecent(capacity_blocks)])) / sum(row.input_tokens for row in trace.rows)


def full_blocks(row: TraceRow, block_tokens: int) -> tuple[int, ...]:
    return row.blocks[: row.input_tokens // block_tokens]
