"""Window parts of blocks: which depths they allow, what is evicted alone, and what goes with a page."""

from __future__ import annotations

import pytest

from tests.unit.kv_cache.windows.test_window_histories import Readable
from twostroke.base.ids import PageId
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.shape import WindowShape, deepest
from twostroke.kv_cache.windows.window_group import WindowGroup, window_group, window_group_of

HASHES = block_hashes_of(range(6), 1)


def pool_of(pages: int = 8, slots: int = 6, tail_blocks: int = 2) -> tuple[BlockPool, WindowGroup, Readable]:
    told = Readable()
    pool = BlockPool(pages, Readable(), window_group(WindowShape(PageId(pages), slots, tail_blocks, 1), told))
    windows = window_group_of(pool)
    assert windows is not None
    return pool, windows, told


def filled(pool: BlockPool, windows: WindowGroup, blocks: range) -> list[PageId]:
    """All pages of the chain, filled and cached, and the window parts of these blocks."""
    claim = pool.claim(HASHES, root_hash(), 0)
    assert claim is not None
    for page in claim.pages:
        pool.fill(page)
    slots = [slot for block in blocks if (slot := windows.take(HASHES[block])) is not None]
    for slot in slots:
        windows.fill(slot)
    windows.release(slots)
    pool.release(claim.pages)
    return slots


@pytest.mark.parametrize(("window", "blocks"), [(512, 32), (17, 2), (16, 1), (1, 1), (18, 2), (128, 8), (33, 3)])
def test_a_tail_has_the_blocks_that_the_next_tokens_see(window: int, blocks: int) -> None:
    shape = WindowShape(PageId(0), 99, window, 16)
    assert shape.tail_blocks == blocks
    for depth in range(1, 50):
        assert shape.first_block(16 * depth) >= shape.tail(depth).start
        assert shape.first_block(16 * depth - 1) == shape.tail(depth).start


@pytest.mark.parametrize("tail_blocks", [1, 2, 3])
def test_the_deepest_hit_is_found_as_by_trying_all_depths(tail_blocks: int) -> None:
    for pattern in range(2**6):
        parts = {block for block in range(6) if pattern >> block & 1}
        depths = [depth for depth in range(7) if set(range(max(0, depth - tail_blocks), depth)) <= parts]
        assert deepest(6, tail_blocks, parts.__contains__) == depths[-1], parts


def test_a_prefix_whose_last_window_parts_are_gone_is_a_hit_only_as_far_as_others_are_there() -> None:
    pool, windows, _ = pool_of()
    filled(pool, windows, range(1, 4))
    assert pool.hits(HASHES) == 4
    assert pool.hits(HASHES[:2]) == 0  # block 0 has no window part, and depth 2 sees it


def test_the_least_recently_used_part_is_evicted_alone() -> None:
    pool, windows, told = pool_of(slots=4)
    first, *_ = filled(pool, windows, range(2, 6))
    assert windows.take_private() == first
    assert told.blocks == set(HASHES[3:])
    assert all(pool.find(block_hash) is not None for block_hash in HASHES)


def test_a_page_takes_its_window_part_along() -> None:
    pool, windows, told = pool_of()
    filled(pool, windows, range(4, 6))
    pool.forget([page for page in [pool.find(HASHES[5])] if page is not None])
    assert told.blocks == {HASHES[4]}
    assert windows.count(PageState.FREE) == 5


def test_a_pin_keeps_the_window_parts_of_its_last_blocks_alone() -> None:
    pool, windows, _ = pool_of(slots=4)
    filled(pool, windows, range(1, 5))
    pool.pin(HASHES[:4])
    assert windows.count(PageState.PINNED) == 2
    assert windows.has_room(2)
    assert not windows.has_room(3)
    taken = [windows.take_private() for _ in range(2)]
    assert None not in taken
    assert pool.hits(HASHES) == 4
    pool.unpin(HASHES[:4])
    assert windows.count(PageState.CACHED) == 2


def test_a_part_that_is_released_before_its_page_has_arrived_is_not_kept() -> None:
    pool, windows, told = pool_of()
    claim = pool.claim(HASHES[:1], root_hash(), 0)
    slot = windows.take(HASHES[0])
    assert claim is not None
    assert slot is not None
    windows.fill(slot)
    windows.release([slot])
    assert told.blocks == set()
    assert windows.count(PageState.FREE) == 6


def test_those_that_have_begun_find_the_slots_that_they_spoke_for() -> None:
    _, windows, _ = pool_of(slots=6)
    assert windows.has_room(6)
    windows.commit(4)
    assert windows.has_room(2)
    assert not windows.has_room(3)
    windows.commit(-4)
    assert windows.has_room(6)
