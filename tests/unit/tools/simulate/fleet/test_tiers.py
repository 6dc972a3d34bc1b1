"""Simulated tiers keep what live ones keep: the same history of a pool is told to both."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.unit.tools.simulate.fleet.fleets import SMALL
from tools.simulate.fleet.event_queue import EventQueue, VirtualLoop
from tools.simulate.fleet.results import WorkerUse
from tools.simulate.fleet.shape import TierShape
from tools.simulate.fleet.worker.tiers import SimulatedDisk, SimulatedTiers
from twostroke.base.ids import BlockHash, Epoch, PageId
from twostroke.config import Role
from twostroke.config.cache import CacheConfig
from twostroke.kv_cache.block import root_hash
from twostroke.kv_cache.events import EventBatch, EventLog
from twostroke.kv_cache.memory import PageMemory
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.tiers.metrics import TierMetrics
from twostroke.worker.tiers.opening import open_disk, page_tiers_of

PAGE_BYTES = 1000
HOST_PAGES, DISK_PAGES = 6, 96
DISK_BYTES = DISK_PAGES * 4096
PLENTY = 1e9
BLOCKS = [BlockHash(bytes([number]) * 16) for number in range(200)]
EVICTED, REUSED, SEEN = "evicted", "reused", "seen"


def history(seed: int) -> Iterator[tuple[str, BlockHash]]:
    """Blocks are seen, some are reused, and most are evicted; the later ones more than the earlier ones."""
    draws = random.Random(seed)
    for number in range(600):
        block = BLOCKS[min(len(BLOCKS) - 1, int(number / 600 * 140 + draws.expovariate(0.05)))]
        yield draws.choices((EVICTED, REUSED, SEEN), (6, 2, 2))[0], block


class Live:
    """The tiers of a worker, told of a pool that there is not."""

    def __init__(self, folder: Path, *, has_host: bool) -> None:
        cache = CacheConfig(disk_cache_bytes=DISK_BYTES, disk_cache_dir=str(folder), disk_write_mb_s=PLENTY / 1e6)
        facts: Any = SimpleNamespace(fingerprint="x", kv_form="int8", page_bytes=PAGE_BYTES)
        self.log = EventLog(Epoch(1, 1))
        host = PageMemory(HOST_PAGES, PAGE_BYTES) if has_host else None
        opened = open_disk(cache, "decode-0", facts)
        self.tiers = page_tiers_of(PageMemory(2, PAGE_BYTES), host, opened, wants_disk=True)
        self.tiers.report_to(TierMetrics(CollectorRegistry(), "decode"))
        self.tiers.begin_epoch(self.log)

    async def tell(self, what: str, block: BlockHash) -> None:
        page = PageId(0)
        if what == EVICTED:
            self.tiers.offload.evicting(page, block, root_hash())
        elif what == REUSED:
            self.tiers.offload.reused(page, block, root_hash())
        else:
            self.tiers.offload.saw(block)
        while self.tiers.disk is not None and self.tiers.disk.writes:
            await asyncio.sleep(0)


class Simulated:
    """The same, in virtual time."""

    def __init__(self, *, has_host: bool) -> None:
        host_bytes = HOST_PAGES * PAGE_BYTES if has_host else 0
        tiers = TierShape(host_bytes=host_bytes, disk_bytes=DISK_BYTES, disk_page_s=1e-6, disk_write_bytes_per_s=PLENTY)
        self.queue, self.log = EventQueue(), EventLog(Epoch(1, 1))
        shape = dataclasses.replace(SMALL, page_bytes=PAGE_BYTES, tiers=tiers)
        host: Any = SimpleNamespace(
            queue=self.queue, shape=shape, log=self.log, role=Role.DECODE, metrics=WorkerMetrics(Role.DECODE, 16),
            use=WorkerUse(worker="decode-0", role=Role.DECODE),
        )  # fmt: skip
        self.tiers = SimulatedTiers(host, SimulatedDisk(self.queue, shape))

    def play(self, told: Sequence[tuple[str, BlockHash]]) -> list[EventBatch]:
        """Tells all of it, one thing in each millisecond; returns what was announced after each."""
        batches: list[EventBatch] = []
        for number, (what, block) in enumerate(told):
            self.queue.at(1e-3 * number, partial(self._tell, what, block))
            self.queue.at(1e-3 * (number + 0.9), lambda: batches.append(self.log.publish()))
        self.queue.at(1e-3 * len(told), self.queue.stop)
        with VirtualLoop(self.queue).running():  # type: ignore[abstract]  # nobody calls the rest
            self.queue.run()
        return batches

    def _tell(self, what: str, block: BlockHash) -> None:
        if what == EVICTED:
            self.tiers.offload.evicting(PageId(0), block, root_hash())
        elif what == REUSED:
            self.tiers.offload.reused(PageId(0), block, root_hash())
        else:
            self.tiers.offload.saw(block)


def same(batch: EventBatch) -> tuple[int, bytes]:
    return batch.block_count, batch.digest


@pytest.mark.parametrize("has_host", [True, False])
@pytest.mark.parametrize("seed", range(3))
async def test_both_keep_the_same_blocks_on_every_tier(seed: int, has_host: bool, tmp_path: Path) -> None:
    told = list(history(seed))
    simulated = Simulated(has_host=has_host).play(told)
    live = Live(tmp_path, has_host=has_host)
    try:
        for number, ((what, block), shown) in enumerate(zip(told, simulated, strict=True)):
            await live.tell(what, block)
            assert same(shown) == same(live.log.publish()), f"{number}: {what} {block.hex()}"
        assert DISK_PAGES / 2 < simulated[-1].block_count < len({block for _, block in told}), "some had to go"
    finally:
        await live.tiers.close()
