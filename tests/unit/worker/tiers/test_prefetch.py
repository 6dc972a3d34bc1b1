"""What waiting requests have on lower tiers comes closer meanwhile, and nothing is taken from those that run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.calls import calls_of
from tests.unit.worker.callers import Received, Router, router_to
from tests.unit.worker.rig import BLOCK, PAGE_BYTES, Running, eventually, expected_tokens, prompt_of
from tests.unit.worker.tiers.tiered import (
    BLOCKS,
    TOKENS,
    A,
    B,
    announced,
    ask,
    faulty,
    of_tier,
    tiered,
    written,
)
from twostroke.base.ids import RequestId, SessionId
from twostroke.config import ScheduleConfig
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.tier import Tier
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.worker.tiers.loads.prefetch import HELD_SHARE, READ_PAGES, Prefetch

ONE_AT_ONCE = ScheduleConfig(max_num_seqs=1, max_num_batched_tokens=256)
LONG = prompt_of(3 * BLOCK, seed=7)
"""A prompt whose answer keeps the worker's only slot until it is closed."""


def on_disk_of_a(running: Running) -> set[bytes]:
    return announced(running, Tier.DISK) & set(block_hashes_of(A, BLOCK))


@contextlib.asynccontextmanager
async def busy_with_a_on_disk(folder: Path, *, pages: int, **settings) -> AsyncIterator[tuple[Running, Router]]:
    """A worker whose disk has A, from an earlier epoch, and whose only slot is taken by another request."""
    async with tiered(folder) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
    async with tiered(folder, pages=pages, schedule=ONE_AT_ONCE, **settings) as worker, router_to(worker) as router:
        assert on_disk_of_a(worker)
        long = await router.open(LONG, (pages - 5) * BLOCK, request_id="long")
        await eventually(lambda: len(long.tokens) > 0)
        yield worker, router


async def finish(router: Router, got: Received) -> None:
    await router.close("long")
    await got.done.wait()
    assert got.tokens == expected_tokens(A, TOKENS)


async def test_blocks_of_a_waiting_request_come_from_disk_to_host_memory(tmp_path: Path) -> None:
    async with busy_with_a_on_disk(tmp_path, pages=210, host_pages=40) as (worker, router):
        wanted = on_disk_of_a(worker)
        got = await router.open(A, TOKENS)
        await eventually(lambda: announced(worker, Tier.HOST) >= wanted)
        assert of_tier(worker, "prefetched_pages_total") == len(wanted)
        assert of_tier(worker, "loaded_pages_total") == 0
        await finish(router, got)
        assert of_tier(worker, "loaded_pages_total", "host") == len(wanted)
        assert of_tier(worker, "loaded_pages_total", "disk") == 0
        await eventually(lambda: not worker.lower.prefetch.held)
        worker.lower.tiers.full.host.store.check_integrity()


async def test_a_block_whose_place_on_disk_goes_to_what_its_host_page_held_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = 4
    async with busy_with_a_on_disk(tmp_path, pages=210, host_pages=pages) as (worker, router):
        tiers, wanted = worker.lower.tiers.full, on_disk_of_a(worker)
        disk = tiers.disk
        monkeypatch.setattr(disk.store, "_most_records", len(disk.store))  # whatever is written has a segment removed
        monkeypatch.setattr(disk._budget, "take_page", lambda *_, **__: False)
        for block_hash in block_hashes_of(prompt_of(pages * BLOCK, seed=8), BLOCK):
            assert tiers.host.promoted(block_hash, b"", tiers.host.take_page())
        monkeypatch.setattr(disk._budget, "take_page", lambda *_, **__: True)
        got = await router.open(A, TOKENS)
        await eventually(lambda: not on_disk_of_a(worker) >= wanted)
        await finish(router, got)
        assert of_tier(worker, "up") == 1
        assert of_tier(worker, "verification_failures_total") == 0
        await eventually(lambda: not worker.lower.prefetch.held)
        tiers.host.store.check_integrity()


async def test_a_request_that_goes_while_it_waits_leaves_nothing_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with busy_with_a_on_disk(tmp_path, pages=210, host_pages=40) as (worker, router):
        before = faults.reads
        faults.answers.clear()
        try:
            await router.open(A, TOKENS)
            await eventually(lambda: worker.lower.prefetch._read is not None and faults.reads > before)
            await router.close("r")
            await eventually(lambda: worker.lower.prefetch._read is None)
            assert not worker.lower.prefetch.held
            assert len(worker.lower.tiers.full.host.store._free) == 40
        finally:
            faults.answers.set()
        await router.close("long")
        await eventually(lambda: not worker.lower.tiers.full.readers(Tier.DISK).pending_pages)
        assert not announced(worker, Tier.HOST)


async def test_without_host_memory_they_come_to_free_pages(tmp_path: Path) -> None:
    async with busy_with_a_on_disk(tmp_path, pages=210) as (worker, router):
        wanted = on_disk_of_a(worker)
        got = await router.open(A, TOKENS)
        await eventually(lambda: all(worker.host.pool.find(each) is not None for each in wanted))
        assert of_tier(worker, "prefetched_pages_total") == len(wanted)
        await eventually(lambda: worker.host.pool.count(PageState.CACHED) == len(wanted))
        await finish(router, got)
        assert got.last.cached_tokens >= (len(wanted) - 1) * BLOCK


async def test_without_host_memory_no_cached_page_is_evicted_for_them_and_they_come_when_pages_are_free(
    tmp_path: Path,
) -> None:
    async with busy_with_a_on_disk(tmp_path, pages=210) as (worker, router):
        pool, wanted = worker.host.pool, on_disk_of_a(worker)
        claim = pool.claim(block_hashes_of(prompt_of(pool.count(PageState.FREE) * BLOCK, seed=9), BLOCK), b"", 0)
        for page in claim.pages:
            pool.fill(page)
        pool.release(claim.pages)
        got = await router.open(A, TOKENS)
        long = router.of("long")
        before = len(long.tokens)
        await eventually(lambda: len(long.tokens) > before + 3 * BLOCK)
        assert of_tier(worker, "prefetched_pages_total") == 0
        pool.forget_cached()
        await eventually(lambda: all(pool.find(each) is not None for each in wanted))
        assert of_tier(worker, "prefetched_pages_total") == len(wanted)
        await finish(router, got)


async def test_pages_on_their_way_to_a_waiting_request_go_back_before_a_running_one_is_preempted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with busy_with_a_on_disk(tmp_path, pages=40) as (worker, router):
        await router.close("long")
        await worker.idle()
        worker.host.pool.forget_cached()
        answer = 36 * BLOCK
        long = await router.open(LONG, answer, request_id="grows")
        await eventually(lambda: len(long.tokens) > 0)
        faults.answers.clear()
        try:
            got = await router.open(A, TOKENS)
            await eventually(lambda: worker.host.pool.count(PageState.ARRIVING) == READ_PAGES)
            await long.done.wait()
            assert long.tokens == expected_tokens(LONG, answer)
            assert worker.metric("preemptions_total") == 0
        finally:
            faults.answers.set()
        await got.done.wait()
        assert got.tokens == expected_tokens(A, TOKENS)


async def test_host_memory_keeps_what_is_about_to_be_loaded_when_pages_are_evicted_for_it() -> None:
    pages = 12
    async with tiered(host_pages=pages) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        assert len(announced(worker, Tier.HOST)) == BLOCKS
        await ask(router, A, request_id="again")
        assert of_tier(worker, "loaded_pages_total", "host") >= int(pages * HELD_SHARE)
        worker.lower.tiers.full.host.store.check_integrity()
        assert of_tier(worker, "bytes", "host") <= pages * PAGE_BYTES


async def test_a_waiting_request_costs_a_look_at_its_own_blocks_however_many_others_wait() -> None:
    async with tiered(host_pages=4 * BLOCKS) as worker, router_to(worker) as router:
        for index, prompt in enumerate((A, B, prompt_of(BLOCKS * BLOCK + 3, seed=9))):
            await ask(router, prompt, request_id=f"{index}")
        a, b = (waiting_for(prompt, index) for index, prompt in enumerate((A, B)))
        others = [waiting_for(prompt_of(BLOCK, seed=seed), seed) for seed in range(20, 34)]

        def calls_for_a(*before: KnownSequence) -> int:
            host, lower = worker.host, worker.lower
            prefetch = Prefetch(
                lower.tiers.full, host.pool, lower.loads, BLOCK, compute_s=host.compute_s, wake=host.loop.wake
            )
            prefetch.begin_admission(before)
            held = prefetch.held
            calls = calls_of(lambda: prefetch.begin_admission([*before, a]))
            assert prefetch.held - held >= BLOCKS - 1, "its blocks are held for it"
            prefetch.stop()
            assert not prefetch.held
            return calls

        assert calls_for_a(b, *others) == calls_for_a(b)


def waiting_for(prompt: tuple[int, ...], number: int) -> KnownSequence:
    name = RequestId(f"waiting-{number}")
    return KnownSequence(name, SessionId(10_000 + number), list(prompt), len(prompt), block_hashes_of(prompt, BLOCK))
