"""Pages are copied on the event loop in parts, and leave turns of it to others, while they hold their block."""

from __future__ import annotations

import asyncio

import pytest

from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.memory import PageMemory
from twostroke.worker.tiers.copies import turn_copies
from twostroke.worker.tiers.copies.turn_copies import TURN_BYTES, TurnCopies

PAGE_BYTES = TURN_BYTES // 4
PARENT = BlockHash(b"parent")


def block(page: int) -> BlockHash:
    return BlockHash(bytes([page]))


class Copies:
    """Notes in which turn of the event loop each page was copied."""

    def __init__(self, memory: PageMemory) -> None:
        self.turns = TurnCopies(memory, self._copy)
        self.copied: list[tuple[int, int]] = []
        self.turn = 0

    def _copy(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        assert (block_hash, parent) == (block(page), PARENT)
        self.turns.spend(PAGE_BYTES)
        self.copied.append((self.turn, page))

    async def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turn += 1
            await asyncio.sleep(0)


async def test_a_long_prompt_that_is_reused_is_copied_over_many_turns_in_order() -> None:
    memory = PageMemory(16, 64)
    copies = Copies(memory)
    for page in range(16):
        assert copies.turns.soon(PageId(page), block(page), PARENT)
    await copies.run(10)
    assert [page for _, page in copies.copied] == list(range(16))
    of_turn = [sum(turn == each for turn, _ in copies.copied) for each in range(copies.turn)]
    assert max(of_turn) == TURN_BYTES // PAGE_BYTES
    assert copies.turns.soon(PageId(0), block(0), PARENT)
    assert copies.copied[-1] == (10, 0), "where nothing waits, a page is copied at once"
    memory.close()


async def test_a_page_that_was_given_to_another_block_meanwhile_is_not_copied() -> None:
    memory = PageMemory(8, 64)
    copies = Copies(memory)
    for page in range(8):
        copies.turns.soon(PageId(page), block(page), PARENT)
    memory.begin_new_generation(PageId(5))
    await copies.run(5)
    assert [page for _, page in copies.copied] == [0, 1, 2, 3, 4, 6, 7]
    memory.close()


async def test_no_more_wait_than_may_and_none_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_copies, "MOST_WAITING", 2)
    memory = PageMemory(8, 64)
    copies = Copies(memory)
    taken = [copies.turns.soon(PageId(page), block(page), PARENT) for page in range(7)]
    assert taken == [True] * 6 + [False]
    copies.turns.stop()
    await copies.run(3)
    assert len(copies.copied) == 4
    memory.close()
