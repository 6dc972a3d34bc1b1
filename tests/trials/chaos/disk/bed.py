"""The cluster: one router, one prefill and one decode worker with few pages, and a disk that can be told to fail."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tests import metrics_page
from tests.cluster.cache.test_index_equality import until_equal
from tests.cluster.processes import ProcessCluster, running_cluster
from tests.trials.chaos.disk.chats import Turn, talk
from tests.trials.chaos.injection import disk_notes
from tests.trials.chaos.injection.injector import BY_CALL
from tests.trials.chaos.injection.plan import ENVIRONMENT
from twostroke.config import DEFAULT_MODEL, PACED_PREFIX, CacheConfig, ModelConfig
from twostroke.engine.backends.paced.runner import PacedSpec
from twostroke.models.catalog.fetch import fetch
from twostroke.models.known_specs import known_spec

BLOCK = 16
PAGES = 24
"""Pages of each worker: the longest request of the chats takes 18, and all chats together many times as many."""
DISK_PAGES = 2000
WORKERS = ("decode-0", "prefill-0")
LOOK_S = 0.02
WRITTEN_S = 10.0
"""Longest wait for writes to end."""


@dataclass
class DiskBed:
    cluster: ProcessCluster
    folder: Path
    note: Path
    page_bytes: int
    expected: list[Turn]
    """What the chats are while the disk is well, all of them asked once."""

    async def talk(self, *, chats: int = 8, turns: int = 3) -> list[Turn]:
        return await talk(self.cluster.grpc, chats=chats, turns=turns)

    async def kill(self) -> None:
        """SIGKILL all workers."""
        await asyncio.gather(*map(self.cluster.kill, WORKERS))

    async def restart(self) -> None:
        await asyncio.gather(*map(self.cluster.restart, WORKERS))

    def disk(self, **said: float) -> None:
        """Lets every worker's disk do this from now on."""
        disk_notes.write(self.note, **said)

    async def announced(self) -> int:
        """Returns the blocks that all workers have, once the router's index is proved equal to theirs."""
        return sum((await until_equal(self.cluster)).values())

    async def counted(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric of the disk tier over all workers."""
        addresses = [str(worker.info["metrics_address"]) for worker in self.cluster.workers.values()]
        labels = {"tier": "disk"} | labels
        return sum(
            [
                await asyncio.to_thread(metrics_page.total, each, f"twostroke_tier_{name}", **labels)
                for each in addresses
            ]
        )

    async def written(self) -> int:
        """Waits until nothing is written any more; returns the blocks on disk."""
        give_up_s, last = time.monotonic() + WRITTEN_S, -1.0
        while (now := await self.counted("blocks")) != last and time.monotonic() < give_up_s:
            last = now
            await asyncio.sleep(0.2)  # other processes have no events here
        return int(now)

    async def until_loaded(self) -> float:
        """Returns the time at which a first page has come from disk."""
        while not await self.counted("loaded_pages_total"):
            await asyncio.sleep(LOOK_S)
        return time.monotonic()

    def warnings(self, text: str) -> int:
        return sum(text in line for line in self.cluster.logs().splitlines())


@asynccontextmanager
async def disk_bed(model: str, dtype: str, folder: Path, *, has_disk: bool = True) -> AsyncIterator[DiskBed]:
    """Yields a cluster in which all chats have been asked once, and what was evicted is on disk."""
    config = ModelConfig(model=model, dtype=dtype)
    model_dir, page_bytes = _fetched(config)
    note, pages = folder / "disk.json", folder / "pages"
    cache = CacheConfig(
        kv_cache_memory_bytes=PAGES * page_bytes,
        disk_cache_bytes=DISK_PAGES * 2 * page_bytes if has_disk else 0,
        disk_cache_dir=str(pages) if has_disk else None,
    )
    with patch.dict(os.environ, {ENVIRONMENT: BY_CALL, disk_notes.ENVIRONMENT: str(note)}):
        async with running_cluster(prefill=1, decode=1, model=config, model_dir=model_dir, cache=cache) as cluster:
            bed = DiskBed(cluster, pages, note, page_bytes, [])
            bed.expected = await bed.talk()
            if has_disk:
                await bed.written()
            yield bed


def _fetched(model: ModelConfig) -> tuple[Path | None, int]:
    """Returns the model's directory, if it has one, and the bytes of a page."""
    if model.is_paced:
        return None, PacedSpec.parse(model.model.removeprefix(PACED_PREFIX)).page_bytes_for(BLOCK)
    model_dir = fetch(model.model or DEFAULT_MODEL, model.dtype, lambda stage, part: None)
    return model_dir, known_spec(model_dir, None).page_bytes(BLOCK, model.dtype)
