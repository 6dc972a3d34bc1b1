"""A worker whose pages come back from host memory, and go on to disk from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import BLOCK, PAGE_BYTES, Running, worker_config
from tests.unit.worker.tiers.tiered import BLOCKS, A, B, C, announced, ask, in_one_of_three, of_tier, tiered, written
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, Role
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.byte_budget import WriteBudget
from twostroke.kv_cache.tiers.host_store import HostEntry
from twostroke.worker.engine_state import EngineState
from twostroke.worker.tiers.branch import Tiers
from twostroke.worker.tiers.host_tier import HostFetcher
from twostroke.worker.tiers.reader import PageRead


def in_host(running: Running) -> set[bytes]:
    return announced(running, Tier.HOST)


def on_disk(running: Running) -> set[bytes]:
    return announced(running, Tier.DISK)


async def test_what_was_evicted_comes_back_from_host_memory() -> None:
    async with tiered(host_pages=30) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        assert len(in_host(worker)) == BLOCKS
        before = worker.metric("computed_tokens_total")
        await ask(router, A, request_id="again")
        assert of_tier(worker, "loaded_pages_total", "host") == BLOCKS
        assert worker.metric("computed_tokens_total") - before < BLOCK
        assert of_tier(worker, "bytes", "host") == len(in_host(worker)) * PAGE_BYTES
        worker.lower.tiers.full.host.store.check_integrity()


async def test_host_memory_is_bounded_and_what_leaves_it_is_on_disk(tmp_path: Path) -> None:
    async with tiered(tmp_path, host_pages=5) as worker, router_to(worker) as router:
        for index, prompt in enumerate((A, B, C)):
            await ask(router, prompt, request_id=f"{index}")
        await written(worker)
        assert len(in_host(worker)) == 5
        assert len(on_disk(worker)) == 2 * BLOCKS, "everything that was evicted"
        assert of_tier(worker, "evicted_pages_total", "host", reason="capacity") > 0
        await ask(router, A, request_id="again")
        assert of_tier(worker, "loaded_pages_total") > 0
        worker.lower.tiers.full.host.store.check_integrity()


async def test_a_page_that_changed_in_host_memory_is_a_counted_miss_and_never_reaches_the_disk(tmp_path: Path) -> None:
    async with tiered(host_pages=30) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        host = worker.lower.tiers.full.host
        first = next(iter(host.store))
        host.data(host.store.get(first))[0] ^= 1
        await ask(router, A, request_id="again")
        assert of_tier(worker, "verification_failures_total", "host") == 1
        assert of_tier(worker, "loaded_pages_total", "host") == BLOCKS - 1


async def test_a_page_that_changed_in_host_memory_is_found_on_its_way_to_disk(tmp_path: Path) -> None:
    async with tiered(tmp_path, host_pages=BLOCKS, write_mb_s=1e-6) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        tiers = worker.lower.tiers.full
        damaged = next(each for each in tiers.host.store if each not in tiers.disk.store)
        tiers.host.data(tiers.host.store.get(damaged))[0] ^= 1
        tiers.disk._budget = WriteBudget(1e9, tiers.disk.form.record_bytes)
        await ask(router, C, request_id="c")
        await written(worker)
        assert damaged not in tiers.host.store
        assert damaged not in on_disk(worker)
        assert on_disk(worker), "the others were written"
        assert of_tier(worker, "verification_failures_total", "host") == 1


async def test_an_error_of_the_host_reader_turns_off_host_memory_and_leaves_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fetcher: HostFetcher, read: PageRead[HostEntry]) -> memoryview:
        raise OSError("the test says so")

    async def trial(folder: Path) -> None:
        async with tiered(folder, host_pages=30) as worker, router_to(worker) as router:
            await ask(router, A)
            await ask(router, B, request_id="b")
            await written(worker)
            with monkeypatch.context() as patch:
                patch.setattr(HostFetcher, "fetch", fails)
                await ask(router, A, request_id="again")
            assert not in_host(worker)
            assert (of_tier(worker, "up", "host"), of_tier(worker, "up", "disk")) == (0, 1)
            assert on_disk(worker)
            await ask(router, B, request_id="from disk")
            assert of_tier(worker, "loaded_pages_total", "disk") > 0, "computing was cheaper"

    await in_one_of_three(trial, tmp_path)


async def test_host_memory_of_less_than_a_page_is_refused_with_the_numbers() -> None:
    cache = CacheConfig(kv_cache_memory_bytes=4 * PAGE_BYTES, host_cache_bytes=PAGE_BYTES - 1)
    config = worker_config(Role.DECODE).replace(cache=cache)
    with pytest.raises(ConfigError, match=rf"--host-cache {PAGE_BYTES - 1} holds 0 pages of {PAGE_BYTES} bytes"):
        await EngineState.load(config, {Tiers: Tiers.load})


@pytest.mark.parametrize("folder", ["/proc/nothing", "/dev/null/pages"])
async def test_a_folder_that_cannot_be_made_is_refused_by_its_flag(folder: str) -> None:
    cache = CacheConfig(kv_cache_memory_bytes=4 * PAGE_BYTES, disk_cache_bytes=1 << 20, disk_cache_dir=folder)
    with pytest.raises(ConfigError, match=f"--disk-cache-dir {folder} cannot be used"):
        await EngineState.load(worker_config(Role.DECODE).replace(cache=cache), {Tiers: Tiers.load})
