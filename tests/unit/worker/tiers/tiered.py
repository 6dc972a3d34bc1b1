"""Workers with few pages, and tiers below these."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.trials.chaos.injection.faulty_files import DiskFaults, FaultyFiles
from tests.unit.worker.callers import Received, Router
from tests.unit.worker.rig import (
    BLOCK,
    PAGE_BYTES,
    Running,
    eventually,
    expected_tokens,
    paced,
    prompt_of,
    serving,
    worker_config,
)
from twostroke.config import Role
from twostroke.kv_cache.tier import Tier
from twostroke.worker.tiers import opening

PAGES = 11
BLOCKS = 10
TOKENS = 4
MODEL = paced(prefill_tokens_per_s=1000)
"""16 ms per block, which a request waits for where its pages do not come back."""
LONG_S = 60.0
"""Seconds that computing is said to take where loads are to pay: a busy machine reads no page later than that."""
SOON_S = 0.5
"""Seconds that computing is said to take where a load from a slow disk is not to pay."""
A, B, C = (prompt_of(BLOCKS * BLOCK + 3, seed=seed) for seed in (1, 2, 3))


@contextlib.asynccontextmanager
async def tiered(
    folder: Path | None = None,
    *,
    host_pages: int = 0,
    disk_pages: int = 1000,
    write_mb_s: float = 100.0,
    role: Role = Role.DECODE,
    pages: int = PAGES,
    model=MODEL,
    compute_s: float = LONG_S,
    **settings,
) -> AsyncIterator[Running]:
    """A worker with so many pages and tiers; `folder` None means no disk.

    `compute_s` is what it predicts for computing any blocks. What it measures says anything beside other work.
    """
    config = worker_config(role, pages=pages, model=model, **settings)
    cache = config.cache.replace(
        host_cache_bytes=host_pages * PAGE_BYTES,
        disk_cache_bytes=disk_pages * 2 * PAGE_BYTES if folder is not None else 0,
        disk_cache_dir=None if folder is None else str(folder),
        disk_write_mb_s=write_mb_s,
    )
    async with serving(config.replace(cache=cache)) as running:
        if host_pages or folder is not None:
            predict(running, compute_s)
        yield running


def predict(running: Running, compute_s: float) -> None:
    """Lets a worker predict this time for computing any blocks."""
    lower = running.lower
    for each in (*lower.loads.prices, lower.prefetch):
        each._compute_s = lambda queued: compute_s


def faulty(monkeypatch: pytest.MonkeyPatch) -> DiskFaults:
    """Lets the disks of workers that start from now on have these faults."""
    faults = DiskFaults()
    monkeypatch.setattr(opening, "SegmentFiles", lambda: FaultyFiles(faults))
    return faults


async def in_one_of_three(trial: Callable[[Path], Awaitable[None]], folder: Path) -> None:
    """A busy machine makes a disk or a step late, and loads dear, but not in each of three trials."""
    for name in ("first", "second"):
        with contextlib.suppress(AssertionError):
            await trial(folder / name)
            return
    await trial(folder / "third")


async def ask(router: Router, prompt: tuple[int, ...], **options) -> Received:
    """Whatever tiers did: no error, and the tokens that the right pages lead to."""
    got = await router.answer(prompt, TOKENS, **options)
    assert not got.last.error.kind, got.last
    assert got.tokens == expected_tokens(prompt, TOKENS)
    return got


def of_tier(running: Running, name: str, tier: str = "disk", **labels: str) -> float:
    return running.metric(f"tier_{name}", tier=tier, **labels)


def announced(running: Running, tier: Tier) -> set[bytes]:
    """What routers are told that lies on a tier."""
    running.host.feed.publish_changes()
    snapshot = running.host.feed.log.snapshot()
    return {block for change in snapshot.further if change.tier is tier for block in change.stored}


async def written(running: Running) -> None:
    """Waits for writes to disk."""
    await eventually(lambda: running.lower.tiers.full.disk is None or not running.lower.tiers.full.disk.writes)


def on_disk(running: Running) -> set[bytes]:
    return announced(running, Tier.DISK)


def bytes_in(folder: Path) -> int:
    """Size of all segments below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*.pages"))
