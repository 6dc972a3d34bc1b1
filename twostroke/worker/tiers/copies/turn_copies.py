"""Copies of pages on the event loop, a few milliseconds in one turn of it: what is left waits for the next turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.memory import Pages

TURN_BYTES = 8 << 20
"""Bytes of pages that are copied in one turn of the event loop: two to three milliseconds."""
MOST_WAITING = 4096
"""Most pages that may wait for their copies: only prompts that are longer than the disk can take at once have more."""


@dataclass(frozen=True, slots=True)
class WaitingCopy:
    """A page that is to be copied as long as it holds its block."""

    page: PageId
    block_hash: BlockHash
    parent: BlockHash
    generation: int


class TurnCopies:
    def __init__(self, memory: Pages, copy: Callable[[PageId, BlockHash, BlockHash], None]) -> None:
        """`copy` copies one page at once if it is still wanted, and calls `spend` with its bytes."""
        self._memory = memory
        self._copy = copy
        self._bytes = 0
        """Bytes that were copied in this turn."""
        self._waiting: deque[WaitingCopy] = deque()

    @property
    def are_over(self) -> bool:
        """Whether nothing more is copied in this turn."""
        return self._bytes >= TURN_BYTES

    def spend(self, turn_bytes: int) -> None:
        if not self._bytes:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._bytes += turn_bytes

    def soon(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> bool:
        """Copies a page now, or in one of the next turns. Returns False if too many wait already."""
        if not self.are_over and not self._waiting:
            self._copy(page, block_hash, parent)
            return True
        if len(self._waiting) >= MOST_WAITING:
            return False
        self._waiting.append(WaitingCopy(page, block_hash, parent, self._memory.generation(page)))
        return True

    def stop(self) -> None:
        """Drops the copies that wait."""
        self._waiting.clear()

    def _begin_turn(self) -> None:
        self._bytes = 0
        while self._waiting and not self.are_over:
            waiting = self._waiting.popleft()
            if self._memory.generation(waiting.page) == waiting.generation:
                self._copy(waiting.page, waiting.block_hash, waiting.parent)
