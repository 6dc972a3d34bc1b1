"""Tiers of a model whose layers with a window keep their parts of blocks apart: both groups spill, and come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.worker.callers import Received, Router, router_to
from tests.unit.worker.rig import BLOCK, PAGE_BYTES, VOCAB, Running, prompt_of
from tests.unit.worker.services.test_fetch import fetch
from tests.unit.worker.tiers.tiered import of_tier, tiered
from twostroke.base.ids import BlockHash, RequestId
from twostroke.config import ModelConfig
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.scheduler.sequence import Sequence
from twostroke.worker.tiers.loads.running import RunningLoads
from twostroke.worker.tiers.opening import share_of
from twostroke.worker.tiers.reader import TierReaders

TAIL, BLOCKS, TOKENS = 4, 10, 4
WINDOWED = ModelConfig(
    model=f"paced:prefill_tokens_per_s=1000,step_ms=1,step_us_per_seq=0,vocab={VOCAB},page_bytes={PAGE_BYTES},"
    f"window={TAIL * BLOCK},max_model_len=512"
)
PAGES = 48
"""Memory for 20 pages and 28 window parts: less than two prompts and their answers."""
PROMPTS = [prompt_of(BLOCKS * BLOCK + 3, seed=seed) for seed in range(5)]
SHORT = prompt_of(3 * BLOCK + 3, seed=9)
"""Its pages are as many as loads for other workers may take of the pool."""
HASHES = block_hashes_of(PROMPTS[0], BLOCK)


def windowed(folder: Path | None = None, host_pages: int = 0, **settings):
    return tiered(folder, host_pages=host_pages, pages=PAGES, model=WINDOWED, **settings)


def on(running: Running, tier: Tier, group: GroupKind) -> set[BlockHash]:
    """What routers are told that lies there."""
    running.host.feed.publish_changes()
    changes = running.host.feed.log.snapshot().changes
    return {each for change in changes if (change.tier, change.group) == (tier, group) for each in change.stored}


async def displaced(router: Router, worker: Running, prompt: tuple[int, ...] = PROMPTS[0]) -> Received:
    """The answer to a prompt, of which nothing is left in the pool after others were answered."""
    fresh = await router.answer(prompt, TOKENS)
    for number, other in enumerate(PROMPTS[1:]):
        await router.answer(other, TOKENS, request_id=f"other-{number}")
        await worker.idle()
    assert worker.host.pool.hits(block_hashes_of(prompt, BLOCK)) == 0
    return fresh


async def test_an_evicted_prompt_comes_back_as_all_its_pages_and_its_last_window_parts() -> None:
    async with windowed(host_pages=200) as worker, router_to(worker) as router:
        fresh = await displaced(router, worker)
        before = of_tier(worker, "loaded_pages_total", "host")
        again = await router.answer(PROMPTS[0], TOKENS, request_id="again")
        assert again.tokens == fresh.tokens
        assert again.last.cached_tokens == BLOCKS * BLOCK
        assert of_tier(worker, "loaded_pages_total", "host") - before == BLOCKS + TAIL


async def test_what_is_computed_sooner_than_loaded_is_computed_where_host_memory_is_the_only_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with windowed(host_pages=200) as worker, router_to(worker) as router:
        fresh = await displaced(router, worker)
        before = of_tier(worker, "loaded_pages_total", "host")
        monkeypatch.setattr(TierReaders, "load_s", lambda *_: 1e9)
        again = await router.answer(PROMPTS[0], TOKENS, request_id="again")
        assert again.tokens == fresh.tokens
        assert of_tier(worker, "loaded_pages_total", "host") == before


async def test_lower_tiers_keep_the_window_parts_of_ends_alone() -> None:
    async with windowed(host_pages=200) as worker, router_to(worker) as router:
        await displaced(router, worker)
        assert set(HASHES) <= on(worker, Tier.HOST, GroupKind.FULL)
        assert on(worker, Tier.HOST, GroupKind.FURTHER).intersection(HASHES) == set(HASHES[-TAIL:])


async def test_a_successor_finds_both_groups_on_disk(tmp_path: Path) -> None:
    async with windowed(tmp_path) as worker, router_to(worker) as router:
        fresh = await displaced(router, worker)
    async with windowed(tmp_path) as worker, router_to(worker) as router:
        assert set(HASHES) <= on(worker, Tier.DISK, GroupKind.FULL)
        assert set(HASHES[-TAIL:]) <= on(worker, Tier.DISK, GroupKind.FURTHER)
        again = await router.answer(PROMPTS[0], TOKENS)
        assert again.tokens == fresh.tokens
        assert again.last.cached_tokens == BLOCKS * BLOCK


async def test_without_the_window_parts_of_its_end_no_page_is_loaded(tmp_path: Path) -> None:
    async with windowed(tmp_path) as worker, router_to(worker) as router:
        fresh = await displaced(router, worker)
        windows = worker.lower.tiers.groups[GroupKind.FURTHER]
        windows.forget_all()
        before = of_tier(worker, "loaded_pages_total")
        again = await router.answer(PROMPTS[0], TOKENS, request_id="again")
        assert again.tokens == fresh.tokens
        assert again.last.cached_tokens == 0
        assert of_tier(worker, "loaded_pages_total") == before


async def test_pages_that_no_load_would_bring_are_not_prefetched(tmp_path: Path) -> None:
    async with windowed(tmp_path) as worker, router_to(worker) as router:
        await displaced(router, worker)
        windows, prefetch = worker.lower.tiers.groups[GroupKind.FURTHER], worker.lower.prefetch
        sequence = Sequence(
            RequestId("waits"), worker.host.new_session(), list(PROMPTS[0]), len(PROMPTS[0]), list(HASHES)
        )
        assert prefetch._hold(sequence).left == list(range(BLOCKS))[::-1]
        windows.forget_all()
        assert prefetch._hold(sequence).left == []
        sequence.pulled_blocks = 3  # a pull brings the window parts there
        assert prefetch._hold(sequence).left == [2, 1, 0]


async def test_another_worker_gets_both_groups_from_a_tier(tmp_path: Path) -> None:
    async with (
        windowed(tmp_path, worker_id="holder") as holder,
        windowed(worker_id="asker") as asker,
        router_to(holder) as old,
        router_to(asker) as new,
    ):
        fresh = await displaced(old, holder, SHORT)
        hashes = block_hashes_of(SHORT, BLOCK)
        assert await fetch(asker, holder, hashes) == len(hashes)
        assert asker.host.pool.hits(hashes) == len(hashes)
        got = await new.answer(SHORT, TOKENS)
        assert got.tokens == fresh.tokens
        assert got.last.local_tokens == len(hashes) * BLOCK


async def test_another_worker_gets_all_last_window_parts_or_none_are_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other loads, which leave no room for further pages of a prefix, leave room for the parts at its end."""
    monkeypatch.setattr(RunningLoads, "pending", lambda loads, group, tier: 0 if group is GroupKind.FULL else 1000)
    async with (
        windowed(tmp_path, worker_id="holder") as holder,
        windowed(worker_id="asker") as asker,
        router_to(holder) as old,
    ):
        await displaced(old, holder, SHORT)
        hashes = block_hashes_of(SHORT, BLOCK)
        assert await fetch(asker, holder, hashes) == len(hashes)


async def test_each_group_has_the_share_of_a_tier_that_it_has_of_the_pool(tmp_path: Path) -> None:
    async with windowed(tmp_path, host_pages=100) as worker:
        cache, layout = worker.host.config.cache, worker.host.facts.layout
        shares = [share_of(group, cache, layout) for group in GroupKind]
        assert sum(each.host_cache_bytes for each in shares) <= cache.host_cache_bytes
        assert (
            shares[0].host_cache_bytes * layout.regions[1].pages == shares[1].host_cache_bytes * layout.regions[0].pages
        )
        used = worker.lower.tiers.uses()[Tier.HOST]
        assert 0.95 * cache.host_cache_bytes < used.most_bytes <= cache.host_cache_bytes
