"""Pages of several groups in one memory: numbered through, side by side, each of its group's length."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from twostroke.base.errors import ConfigError
from twostroke.base.ids import PageId
from twostroke.kv_cache.layout import PageRegion, PoolLayout
from twostroke.kv_cache.memory import PageMemory
from twostroke.kv_cache.pool_size import host_pool_bytes
from twostroke.kv_cache.windows.pool_share import SharedPool

LAYOUT = PoolLayout.of(5, 4100, PageRegion(3, 96), PageRegion(4, 5000))


def test_pages_are_numbered_through_and_know_their_group_and_length() -> None:
    assert [LAYOUT.region_of(page) for page in range(LAYOUT.pages)] == [0] * 5 + [1] * 3 + [2] * 4
    assert [LAYOUT.first(region) for region in range(3)] == [0, 5, 8]
    assert [LAYOUT.page_bytes_of(page) for page in (4, 5, 11)] == [4100, 96, 5000]
    assert LAYOUT.bytes_of([0, 1, 7, 8]) == 2 * 4100 + 96 + 5000
    assert LAYOUT.block_bytes == 4100 + 96 + 5000


def test_no_two_pages_overlap_and_every_region_begins_on_a_page_of_the_system() -> None:
    taken = np.zeros(LAYOUT.size_bytes, np.uint8)
    for page in range(LAYOUT.pages):
        taken[LAYOUT.span(page)] += 1
    for start, region in zip(LAYOUT.starts, LAYOUT.regions, strict=True):
        assert start % mmap.PAGESIZE == 0
        taken[start + region.pages * region.page_bytes : start + region.size_bytes] += 1  # the scratch page
    assert taken.max() == 1
    assert taken.sum() == sum(region.size_bytes for region in LAYOUT.regions)


def test_a_pool_of_one_group_is_as_large_as_ever() -> None:
    assert PoolLayout.of(300, 4096 + 64).host_bytes == host_pool_bytes(300, 4096 + 64)


def test_a_reader_finds_the_pages_of_every_group_in_the_memory_that_it_was_handed() -> None:
    memory = PageMemory(5, 4100, PageRegion(3, 96))
    reader = PageMemory.attach(os.dup(memory.fd), memory.layout)
    for page in range(memory.pages):
        memory.page(PageId(page))[:] = page + 1
        memory.begin_new_generation(PageId(page))
    assert [region.shape for region in memory.regions] == [(6, 4100), (4, 96)]
    assert [(len(reader.page(PageId(page))), *set(reader.page(PageId(page)))) for page in range(8)] == [
        (4100 if page < 5 else 96, page + 1) for page in range(8)
    ]
    assert reader.generations.tolist() == [1] * 8
    assert [memory.regions[group][-1].any() for group in (0, 1)] == [False, False], "scratch pages are nobody's"
    window = memory.access(2)
    assert [[len(view) for view in views] for views in window.read([[4, 7], [5]])] == [[4100, 96], [96]]
    window.close()
    reader.close()
    memory.close()


def shared(**changes: object) -> SharedPool:
    facts = {"window": 512, "page_sizes": (48 << 10, 240 << 10), "block_size": 16,
             "longest": 32_768, "step_tokens": 512} | changes  # fmt: skip
    return SharedPool(**facts)  # type: ignore[arg-type]  # the facts of the test's own


def test_a_window_has_as_many_pages_as_sequences_of_four_windows_hold() -> None:
    layout = shared().layout(1 << 30)
    full, window = layout.regions
    assert window.pages / full.pages == pytest.approx(34 / 128, abs=1e-3)
    assert 0.999 * (1 << 30) < full.pages * full.page_bytes + window.pages * window.page_bytes <= 1 << 30


@pytest.mark.parametrize("memory_bytes", [1 << 22, 10 << 20, 40 << 20, 1 << 28])
@pytest.mark.parametrize("share", [None, 0.01, 0.5, 1.0])
def test_the_groups_fit_into_the_memory_and_no_window_has_more_pages_than_there_are_blocks(
    memory_bytes: int, share: float | None
) -> None:
    pool = shared(window_share=share)
    full, window = pool.layout(memory_bytes).regions
    assert full.pages * full.page_bytes + window.pages * window.page_bytes <= memory_bytes
    assert window.pages <= full.pages
    assert window.pages >= min(full.pages, pool.least_windows)


def test_a_model_that_serves_nothing_longer_than_its_window_keeps_a_page_of_both_groups_for_each_block() -> None:
    full, window = shared(longest=500).layout(1 << 28).regions
    assert full.pages == window.pages


def test_memory_that_holds_no_two_blocks_is_refused_by_its_setting() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory 300000 holds 1 pages of 294912 bytes; at least 2"):
        shared().layout(300_000)
    assert shared(window=None, page_sizes=(1000,)).layout(10_500) == PoolLayout.of(10, 1000)
