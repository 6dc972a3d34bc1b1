"""Peers that pull pages from the disk of a worker: served, bounded, and given up with the tier."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.ready_pages import pages_in
from tests.unit.worker.callers import Puller, router_to
from tests.unit.worker.rig import BLOCK, Running, decode, eventually, prompt_of
from tests.unit.worker.tiers.tiered import (
    BLOCKS,
    LONG_S,
    MODEL,
    SOON_S,
    A,
    B,
    C,
    ask,
    faulty,
    of_tier,
    on_disk,
    predict,
    tiered,
    written,
)
from twostroke.base.errors import TransferFailed
from twostroke.base.ids import PageId
from twostroke.config import Role
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.disk_store import RecordPlace
from twostroke.worker.tiers.loads import running, shared_loads
from twostroke.worker.tiers.reader import PageRead


async def test_a_peer_pulls_from_the_disk_of_another_worker(tmp_path: Path) -> None:
    async with (
        tiered(tmp_path, role=Role.PREFILL) as source,
        decode(model=MODEL) as target,
        router_to(target) as router,
    ):
        await ask(router, A, source=source)
        await ask(router, B, request_id="b", source=source)
        await written(source)
        target.host.pool.forget_cached()  # its own pool is larger
        before = source.metric("computed_tokens_total")
        await ask(router, A, request_id="again", source=source)
        assert of_tier(source, "loaded_pages_total") > 0
        assert source.metric("computed_tokens_total") - before < BLOCKS * BLOCK


async def test_a_cached_only_pull_is_served_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_loads, "POOL_PART", 1)
    async with tiered(tmp_path) as holder, router_to(holder) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(holder)
        hashes = block_hashes_of(A, BLOCK)
        wanted = [block for block, each in enumerate(hashes) if each in on_disk(holder)]
        assert wanted
        puller = Puller(holder.info)
        call = puller.pull(A[: BLOCKS * BLOCK], wanted, cached_only=True)
        ready = await puller.pages(call, len(wanted))
        assert sorted(page.block for page in pages_in(ready)) == wanted
        call.cancel()
        await puller.aclose()
        assert of_tier(holder, "loaded_pages_total") > 0


@contextlib.asynccontextmanager
async def _pulled_from(folder: Path) -> AsyncIterator[tuple[Running, Puller, list[int]]]:
    """A worker whose disk has blocks of A and B that its pages have not, a puller, and which blocks of A these are."""
    async with tiered(folder, pages=4 * BLOCKS) as holder, router_to(holder) as router:
        for prompt in (A, B, *(prompt_of(BLOCKS * BLOCK + 3, seed=seed) for seed in range(10, 15))):
            await ask(router, prompt, request_id=f"{hash(prompt)}")
        await written(holder)
        on_tier = on_disk(holder)
        puller = Puller(holder.info)
        try:
            yield holder, puller, [block for block, each in enumerate(block_hashes_of(A, BLOCK)) if each in on_tier]
        finally:
            await puller.aclose()


async def test_pulls_from_a_disk_that_never_answers_hold_up_nobody_and_keep_few_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with _pulled_from(tmp_path) as (holder, puller, wanted), router_to(holder) as router:
        pool, most = holder.host.pool, 4 * BLOCKS // shared_loads.POOL_PART
        predict(holder, SOON_S)
        faults.answers.clear()
        try:
            first = puller.pull(A[: BLOCKS * BLOCK], wanted, cached_only=True)
            await eventually(lambda: holder.lower.loads.running.open == 1)
            assert 0 < pool.count(PageState.ARRIVING) <= most
            async with asyncio.timeout(LONG_S):
                await ask(router, A, request_id="same")
                await ask(router, C, request_id="other")
            first.cancel()
            for _ in range(10):
                refusal = await puller.refusal(puller.pull(B[: BLOCKS * BLOCK], wanted, cached_only=True))
                assert isinstance(refusal, TransferFailed)
                assert pool.count(PageState.QUARANTINED) + pool.count(PageState.ARRIVING) <= most
        finally:
            faults.answers.set()
        await eventually(lambda: not holder.lower.loads.running.open)
        assert pool.count(PageState.QUARANTINED) == 0
        pool.check_integrity()


async def test_pulls_at_once_from_a_disk_that_never_answers_take_few_pages_and_give_them_back_as_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "LOOK_S", 60.0)
    faults = faulty(monkeypatch)
    async with _pulled_from(tmp_path) as (holder, puller, wanted):
        pool, most = holder.host.pool, 4 * BLOCKS // shared_loads.POOL_PART
        faults.answers.clear()
        try:
            calls = [puller.pull(each[: BLOCKS * BLOCK], wanted, cached_only=True) for each in (A, B) * 5]
            await eventually(lambda: holder.lower.loads.running.open > 0)
            await asyncio.gather(*(call.read() for call in calls))
            assert 0 < pool.count(PageState.ARRIVING) <= most
            for call in calls:
                call.cancel()
            await eventually(lambda: not pool.count(PageState.ARRIVING))
            await eventually(lambda: not pool.count(PageState.QUARANTINED))
        finally:
            faults.answers.set()


async def test_a_disk_that_is_turned_off_takes_its_loads_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "LOOK_S", 60.0)
    faults = faulty(monkeypatch)
    async with _pulled_from(tmp_path) as (holder, puller, wanted):
        faults.answers.clear()
        try:
            call = puller.pull(A[: BLOCKS * BLOCK], wanted[:1], cached_only=True)
            await eventually(lambda: holder.lower.loads.running.open == 1)
            holder.lower.tiers.full.turn_off(Tier.DISK, "the test says so")
            assert isinstance(await puller.refusal(call), TransferFailed)
            await eventually(lambda: not holder.host.pool.count(PageState.QUARANTINED))
        finally:
            faults.answers.set()


@pytest.mark.parametrize("fault", ["other bytes", "no file"])
async def test_what_a_stale_read_found_does_not_count_against_the_block_at_its_new_place(
    tmp_path: Path, fault: str
) -> None:
    async with _pulled_from(tmp_path) as (holder, _, _):
        tiers = holder.lower.tiers.full
        tell = tiers.damaged_read if fault == "other bytes" else tiers.missing_read
        block, gone = list(tiers.disk.store)[:2]
        here, left = tiers.place(Tier.DISK, block), tiers.place(Tier.DISK, gone)
        stale = RecordPlace(here.path.with_name("reclaimed.pages"), here.offset)
        tell(Tier.DISK, PageRead(0, block, PageId(0), stale))
        assert tiers.place(Tier.DISK, block) == here, "the new record is found"
        tiers.disk.drop(gone)
        tell(Tier.DISK, PageRead(0, gone, PageId(0), left))
        assert of_tier(holder, "verification_failures_total") == 0
        tell(Tier.DISK, PageRead(0, block, PageId(0), here))
        assert tiers.place(Tier.DISK, block) is None
        assert of_tier(holder, "verification_failures_total") == (fault == "other bytes")


async def test_a_block_that_is_claimed_for_another_worker_has_its_place_in_its_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with _pulled_from(tmp_path) as (holder, _, wanted):
        pool, asked = holder.host.pool, wanted[1:]  # none of them is the first block
        faults.answers.clear()
        try:
            claimed = holder.lower.loads.for_others.share(GroupKind.FULL, block_hashes_of(A, BLOCK), asked)
            holder.lower.loads.running.stop()
        finally:
            faults.answers.set()
        assert 0 < len(claimed) == pool.unwritten.blocks
        assert pool.unwritten.depths == sum(claimed), "what is left to compute is priced by it"
        pool.release(claimed.values())
        pool.check_integrity()
