"""A worker whose pages come back from disk: right, counted and announced, within its bytes and its budget."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import BLOCK, PAGE_BYTES, prompt_of, worker_config
from tests.unit.worker.tiers.tiered import (
    BLOCKS,
    A,
    B,
    ask,
    bytes_in,
    faulty,
    of_tier,
    on_disk,
    tiered,
    written,
)
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, Role
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.transfer.base import digest
from twostroke.worker.engine_state import EngineState
from twostroke.worker.tiers.branch import Tiers


async def test_what_was_evicted_comes_back_from_disk_instead_of_being_computed(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        before = worker.metric("computed_tokens_total")
        got = await ask(router, A, request_id="again")
        assert of_tier(worker, "loaded_pages_total") >= BLOCKS - 2
        assert worker.metric("computed_tokens_total") - before <= 3 * BLOCK + 8
        assert got.last.cached_tokens >= (BLOCKS - 2) * BLOCK, "what was loaded counts as cached"
        assert of_tier(worker, "saved_seconds_total") > 0
        assert of_tier(worker, "written_bytes_total") > 0
        assert worker.host.load_report().tiers[0].page_s > 0


async def test_a_successor_announces_the_shelf_before_its_first_request_and_serves_from_it(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        told = on_disk(worker)
    assert told
    async with tiered(tmp_path) as again, router_to(again) as router:
        assert on_disk(again) == told
        assert again.host.feed.log.sequence == 1, "the first batch has it all"
        await ask(router, A)
        assert of_tier(again, "loaded_pages_total") > 0


async def test_blocks_of_another_model_are_not_found(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        assert on_disk(worker)
    other = worker.host.config.model.replace(model=worker.host.config.model.model.replace("vocab=2048", "vocab=4096"))
    async with tiered(tmp_path, model=other) as worker:
        assert not on_disk(worker)


async def test_the_disk_never_takes_more_than_it_may_and_routers_know_what_went(tmp_path: Path) -> None:
    async with tiered(tmp_path, disk_pages=12) as worker, router_to(worker) as router:
        disk = worker.lower.tiers.full.disk
        for seed in range(8):
            await ask(router, prompt_of(BLOCKS * BLOCK + 3, seed=seed), request_id=f"{seed}")
            await written(worker)
            assert on_disk(worker) == set(disk.store)
        assert 0 < bytes_in(tmp_path) <= disk.store.most_bytes
        assert of_tier(worker, "evicted_pages_total", reason="capacity") > 0
        assert of_tier(worker, "eviction_age_seconds_count") == of_tier(
            worker, "evicted_pages_total", reason="capacity"
        )


async def test_a_small_budget_is_kept_for_blocks_that_were_wanted_twice(tmp_path: Path) -> None:
    async with tiered(tmp_path, write_mb_s=0.001) as worker, router_to(worker) as router:
        for seed in range(4):
            await ask(router, prompt_of(BLOCKS * BLOCK + 3, seed=seed), request_id=f"{seed}")
        assert not on_disk(worker)
        assert of_tier(worker, "skipped_pages_total", reason="budget") > 0
        await ask(router, prompt_of(BLOCKS * BLOCK + 3, seed=3), request_id="again")
        await written(worker)
        assert len(on_disk(worker)) == 1, "the page that the budget had room for"


async def test_a_disk_with_room_for_one_page_is_refused_with_the_numbers(tmp_path: Path) -> None:
    cache = CacheConfig(kv_cache_memory_bytes=4 * PAGE_BYTES, disk_cache_bytes=30_000, disk_cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="--disk-cache 30000 holds 1 pages of 20480 bytes; at least 2 are needed"):
        await EngineState.load(worker_config(Role.DECODE).replace(cache=cache), {Tiers: Tiers.load})


async def test_a_flipped_bit_is_a_counted_miss_and_its_record_never_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        faults.flips = 1
        await ask(router, A, request_id="again")
        assert of_tier(worker, "verification_failures_total") == 1
        assert of_tier(worker, "evicted_pages_total", reason="damaged") == 1
        await written(worker)
        kept = on_disk(worker)
    async with tiered(tmp_path) as again:
        assert on_disk(again) == kept


async def test_a_block_that_is_dropped_while_it_is_written_never_comes_back(tmp_path: Path) -> None:
    dropped, kept = block_hashes_of(A, BLOCK)[:2]
    async with tiered(tmp_path) as worker:
        disk = worker.lower.tiers.full.disk
        for block_hash in (dropped, kept):
            target = disk.target(block_hash, root_hash())
            assert target is not None
            target.data[:] = 7
            target.commit(digest(target.data))
        disk.drop(dropped)
        await disk.wait_idle()
        assert set(disk.store) == {kept}
    async with tiered(tmp_path) as again:
        assert set(again.lower.tiers.full.disk.store) == {kept}


async def test_no_dead_record_is_written_for_a_segment_that_has_gone(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        disk = worker.lower.tiers.full.disk
        for path in disk.folder.glob("*.pages"):
            path.unlink()
        for block_hash in list(disk.store):
            assert disk.drop(block_hash)
        await disk.wait_idle()
        assert not list(disk.folder.glob("*.pages"))


async def test_one_load_serves_all_who_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = faulty(monkeypatch)
    async with tiered(tmp_path, pages=40) as worker, router_to(worker) as router:
        await ask(router, A)
        for seed in range(10, 14):
            await ask(router, prompt_of(BLOCKS * BLOCK + 3, seed=seed), request_id=f"{seed}")
        await written(worker)
        before = faults.reads
        await asyncio.gather(*(ask(router, A, request_id=f"a{index}") for index in range(12)))
        assert 0 < faults.reads - before <= BLOCKS
        assert of_tier(worker, "loaded_pages_total") == faults.reads - before


async def test_forgetting_the_cache_forgets_the_disk_too(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        forgotten = on_disk(worker)
        assert worker.lower.tiers.full.forget_all() == len(forgotten) > 0
        worker.host.pool.forget_cached()
        await ask(router, A, request_id="again")
        assert of_tier(worker, "loaded_pages_total") == 0
    async with tiered(tmp_path) as again:
        assert not on_disk(again) & forgotten
