"""A disk about as fast as computing brings the last blocks while the first ones are computed, until both meet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.trials.chaos.injection.faulty_files import DiskFaults
from tests.unit.worker.callers import Router, router_to
from tests.unit.worker.rig import BLOCK, Running, eventually, prompt_of
from tests.unit.worker.tiers.tiered import ask, faulty, in_one_of_three, of_tier, tiered, written
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.tier import Tier

COUNT = 40
PAGES = COUNT + 2
LONG, OTHER = (prompt_of(COUNT * BLOCK + 3, seed=seed) for seed in (5, 6))
COMPUTE_S = 0.016
"""Time of computing a block (`tiered.MODEL`)."""


@contextlib.asynccontextmanager
async def with_long_on_disk(folder: Path, faults: DiskFaults, read_s: float) -> AsyncIterator[tuple[Running, Router]]:
    """A worker whose disk takes so long for a page, and has nearly all blocks of LONG."""
    faults.read_delay_s = read_s
    async with tiered(folder, pages=PAGES) as worker, router_to(worker) as router:
        await ask(router, LONG)
        await ask(router, OTHER, request_id="other")
        await written(worker)
        disk = worker.lower.tiers.full.disk
        assert sum(each in disk.store for each in block_hashes_of(LONG, BLOCK)) >= COUNT - 2
        yield worker, router


async def test_a_disk_as_fast_as_computing_brings_about_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = faulty(monkeypatch)

    async def trial(folder: Path) -> None:
        async with with_long_on_disk(folder, faults, COMPUTE_S) as (worker, router):
            computed = worker.metric("computed_tokens_total")
            await ask(router, LONG, request_id="again")
            loaded = of_tier(worker, "loaded_pages_total")
            assert COUNT / 4 <= loaded <= 3 * COUNT / 4
            assert worker.metric("computed_tokens_total") - computed <= (COUNT - loaded + 2) * BLOCK
            assert of_tier(worker, "refused_loads_total") == of_tier(worker, "given_up_loads_total") == 0

    await in_one_of_three(trial, tmp_path)


async def test_the_load_brings_the_last_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = faulty(monkeypatch)

    async def trial(folder: Path) -> None:
        async with with_long_on_disk(folder, faults, COMPUTE_S) as (worker, router):
            pool, hashes = worker.host.pool, block_hashes_of(LONG, BLOCK)
            waiting = asyncio.create_task(ask(router, LONG, request_id="again"))
            on_disk = [each for each in hashes if worker.lower.tiers.full.place(Tier.DISK, each) is not None]
            await eventually(lambda: pool.find(on_disk[-2]) is not None)
            comes_later = pool.find(on_disk[len(on_disk) // 2]) is None
            await waiting
            assert comes_later, "what lies between"

    await in_one_of_three(trial, tmp_path)


async def test_computing_takes_over_from_a_disk_that_became_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)

    async def trial(folder: Path) -> None:
        async with with_long_on_disk(folder, faults, COMPUTE_S) as (worker, router):
            computed = worker.metric("computed_tokens_total")
            faults.read_delay_s = 2.5 * COMPUTE_S
            await ask(router, LONG, request_id="again")
            loaded = of_tier(worker, "loaded_pages_total")
            assert 0 < loaded < COUNT / 2, "less than was planned"
            assert worker.metric("computed_tokens_total") - computed >= (COUNT - loaded - 2) * BLOCK

    await in_one_of_three(trial, tmp_path)


async def test_a_disk_that_never_answers_leaves_all_to_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with with_long_on_disk(tmp_path, faults, COMPUTE_S) as (worker, router):
        faults.answers.clear()
        try:
            await ask(router, LONG, request_id="again")
        finally:
            faults.answers.set()
        assert of_tier(worker, "loaded_pages_total") == 0
