"""What a claim evicts is copied before, on a thread: nothing is lost, no long wait, and first blocks come first."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.worker.callers import Received, Router, router_to
from tests.unit.worker.rig import BLOCK, PAGE_BYTES, Running, eventually, prefill, prompt_of
from tests.unit.worker.tiers.tiered import BLOCKS, LONG_S, PAGES, A, B, C, announced, of_tier, tiered, written
from tests.unit.worker.tiers.tiered import ask as ask_as
from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.memory import PageAccess, PageMemory
from twostroke.kv_cache.tier import Tier
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.convert import hashes_to_bytes
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.transfer.base import digest
from twostroke.worker.tiers.copies import eviction_copies, offload, turn_copies
from twostroke.worker.tiers.copies.copy_target import CopyTarget

TURN_PAGES = 2
"""Pages that are copied on the event loop in one turn, here."""
CHAINS = {prompt: block_hashes_of(prompt[: BLOCKS * BLOCK], BLOCK) for prompt in (A, B, C)}


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (offload, eviction_copies, turn_copies):
        monkeypatch.setattr(module, "TURN_BYTES", TURN_PAGES * PAGE_BYTES)
    monkeypatch.setattr(eviction_copies, "BATCH_BYTES", 3 * PAGE_BYTES)
    monkeypatch.setattr(eviction_copies, "LONGEST_WAIT_S", LONG_S)


NUMBERS = itertools.count()


async def ask(router: Router, prompt: tuple[int, ...]) -> Received:
    return await ask_as(router, prompt, request_id=f"r{next(NUMBERS)}")


class Blockade:
    """Holds up the copying thread between two pages."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.threads: set[str] = set()
        self.pages = 0

    def digest(self, data: memoryview) -> bytes:
        self.threads.add(threading.current_thread().name)
        self.pages += 1
        assert self.is_open.wait(60)
        return offload.digest(data)


@pytest.fixture
def blockade(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blockade]:
    blockade = Blockade()
    monkeypatch.setattr(eviction_copies, "digest", blockade.digest)
    yield blockade
    blockade.is_open.set()


@contextlib.asynccontextmanager
async def holding_a(
    folder: Path | None = None, *, host_pages: int = 100, **settings
) -> AsyncIterator[tuple[Running, Router]]:
    """A worker whose pool holds A and little else. In the end no page is lost, of the pool or of host memory."""
    async with tiered(folder, host_pages=host_pages, **settings) as worker, router_to(worker) as router:
        await ask(router, A)
        yield worker, router
        await worker.idle()
        await written(worker)
        copies, host = worker.lower.copies, worker.lower.tiers.full.host
        await eventually(lambda: not copies._waiting and not copies._jobs)
        worker.host.pool.check_integrity()
        if host is not None:
            host.store.check_integrity()
            assert len(host.store) + len(host.store._free) == host.store.pages, "a page of host memory was lost"


@contextlib.asynccontextmanager
async def copying(blockade: Blockade, evicting: Awaitable[Any]) -> AsyncIterator[asyncio.Future[Any]]:
    """Begins what evicts A; its copies are not done before the end, and it is."""
    blockade.is_open.clear()
    begun = asyncio.ensure_future(evicting)
    await eventually(lambda: blockade.pages > 0)
    try:
        yield begun
    finally:
        blockade.is_open.set()
    await begun


async def computed_for(worker: Running, router: Router, prompt: tuple[int, ...]) -> float:
    """Asks; returns the tokens that were computed for it."""
    before = worker.metric("computed_tokens_total")
    await ask(router, prompt)
    return worker.metric("computed_tokens_total") - before


async def test_all_that_a_long_prompt_evicts_is_copied_on_a_thread_and_comes_back(blockade: Blockade) -> None:
    async with holding_a() as (worker, router):
        await ask(router, B)
        assert blockade.pages >= BLOCKS - TURN_PAGES
        assert blockade.threads == {"tier-copies-0"}
        assert set(CHAINS[A]) <= announced(worker, Tier.HOST)
        assert await computed_for(worker, router, A) < BLOCK
        assert of_tier(worker, "skipped_pages_total", "host", reason="late") == 0


async def test_where_host_memory_is_short_the_first_blocks_are_kept() -> None:
    async with holding_a(host_pages=4) as (worker, router):
        await ask(router, B)
        assert announced(worker, Tier.HOST) == set(CHAINS[A][:4])


async def test_where_the_disk_takes_few_pages_it_gets_the_first_blocks(tmp_path: Path) -> None:
    async with holding_a(tmp_path, host_pages=0, write_mb_s=4 * 4 * PAGE_BYTES / 4e6) as (worker, router):
        await ask(router, B)
        await written(worker)
        on_disk = [block_hash in announced(worker, Tier.DISK) for block_hash in CHAINS[A]]
        assert any(on_disk)
        assert on_disk == sorted(on_disk, reverse=True), "a block without those before it is of no use"


async def test_a_claim_does_not_wait_longer_than_it_may_and_loses_only_copies(
    blockade: Blockade, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(eviction_copies, "LONGEST_WAIT_S", 0.05)
    async with holding_a() as (worker, router):
        async with copying(blockade, ask(router, B)) as asked:
            await asked
            assert "claim does not wait for copies" in caplog.text
            assert of_tier(worker, "skipped_pages_total", "host", reason="late") > 0
        await eventually(lambda: not worker.lower.copies._waiting)
        assert await computed_for(worker, router, A) > BLOCK


async def test_what_a_claim_would_evict_can_be_hit_while_it_is_copied_and_short_prompts_pass(
    blockade: Blockade,
) -> None:
    async with holding_a(pages=14) as (worker, router), copying(blockade, ask(router, B)) as asked:
        assert (await ask(router, prompt_of(BLOCK, seed=9))).tokens
        assert worker.host.pool.hits(CHAINS[A]) == BLOCKS
        assert worker.host.pool.count(PageState.ACTIVE) == 0
        assert not asked.done()


async def test_a_block_that_is_forgotten_while_it_is_copied_is_not_kept(blockade: Blockade) -> None:
    async with holding_a() as (worker, router):
        async with copying(blockade, ask(router, B)):
            assert worker.host.pool.forget_cached() + worker.lower.tiers.full.forget_all() > 0
        await worker.idle()
        assert not announced(worker, Tier.HOST) & set(CHAINS[A])


async def test_what_waits_to_be_copied_to_disk_is_not_kept_after_all_was_forgotten(tmp_path: Path) -> None:
    async with holding_a(tmp_path, host_pages=0) as (worker, _):
        pool, tiers = worker.host.pool, worker.lower.tiers.full
        for parent, block in itertools.pairwise([root_hash(), *CHAINS[A]]):
            page = pool.find(block)
            assert page is not None
            tiers.offload.reused(page, block, parent)
        pool.forget_cached()
        tiers.forget_all()
        for _ in range(BLOCKS):
            await asyncio.sleep(0)
        assert tiers.disk is not None
        assert not any(map(tiers.disk.keeps, CHAINS[A]))


async def test_a_request_that_ends_while_it_waits_leaves_nothing_behind(
    blockade: Blockade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction_copies, "LONGEST_WAIT_S", 0.2)
    async with holding_a() as (worker, router):
        async with copying(blockade, router.open(B, 4, request_id="left")):
            await router.close("left")
        await eventually(lambda: not worker.lower.copies._jobs)
        assert worker.host.pool.hits(CHAINS[A]) == BLOCKS


async def test_a_request_that_ends_while_its_copies_take_too_long_is_forgotten(
    blockade: Blockade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction_copies, "LONGEST_WAIT_S", 0.1)
    async with holding_a() as (worker, router), copying(blockade, router.open(B, 4, request_id="left")):
        await router.close("left")
        await eventually(lambda: not worker.lower.copies._jobs)


def counting_looks(running: Running, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Returns a list that gets an entry each time that all cached blocks are looked through."""
    pool, looks = running.host.pool, []
    cached = pool.cached
    monkeypatch.setattr(pool, "cached", lambda: (looks.append(None), cached())[1])
    return looks


async def test_nothing_is_looked_for_again_and_again_for_a_claim_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with holding_a() as (worker, _):
        pool, copies, looks = worker.host.pool, worker.lower.copies, counting_looks(worker, monkeypatch)
        private = PAGES - BLOCKS + TURN_PAGES + 1
        for _ in range(3):
            assert copies.may_claim(worker.host.new_session(), CHAINS[A], private)
            assert pool.claim(CHAINS[A], root_hash(), private) is None
            await asyncio.sleep(0)
        assert not looks


async def test_of_many_claims_that_wait_one_is_prepared_at_a_time(
    blockade: Blockade, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with holding_a() as (worker, _):
        copies, looks = worker.lower.copies, counting_looks(worker, monkeypatch)
        blockade.is_open.clear()
        sessions = [worker.host.new_session() for _ in range(4)]
        assert not any(copies.may_claim(session, CHAINS[B], 0) for session in sessions)
        assert len(looks) == 1
        blockade.is_open.set()
        for session in sessions:
            await copies.ready(session, CHAINS[B], 0)
        assert not copies._jobs


async def test_a_worker_that_closes_while_pages_are_copied_ends(blockade: Blockade) -> None:
    async with tiered(host_pages=100) as worker, router_to(worker) as router:
        await ask(router, A)
        blockade.is_open.clear()
        waiting = asyncio.create_task(ask(router, B))
        await eventually(lambda: blockade.pages > 0)
        waiting.cancel()
        asyncio.get_running_loop().call_later(0.1, blockade.is_open.set)


async def fetch_b(target: Running, source: Running) -> None:
    channel = PeerChannel(target.info.address, target.host.config.cluster_token)
    request = worker_pb2.FetchRequest(
        fingerprint=target.host.facts.fingerprint,
        worker_epoch=str(target.host.epoch),
        source=source.source,
        block_hashes=hashes_to_bytes(CHAINS[B]),
        root=bytes(16),
        within_s=5,
    )
    await worker_pb2_grpc.PagesStub(channel.channel).Fetch(request, metadata=channel.metadata, timeout=60)
    await channel.close()


async def test_a_fetch_waits_for_the_copies_of_what_it_evicts(blockade: Blockade) -> None:
    async with prefill("leaving") as leaving, holding_a() as (worker, _):
        await worker.idle()
        async with copying(blockade, fetch_b(worker, leaving)):
            assert worker.host.pool.hits(CHAINS[A]) == BLOCKS
        assert set(CHAINS[A][1:]) <= announced(worker, Tier.HOST)


async def test_many_prompts_at_once_over_few_pages_get_right_tokens_and_lose_no_page(tmp_path: Path) -> None:
    prompts = [prompt_of(BLOCK * length + 3, seed=seed) for seed, length in enumerate([9, 3, 6, 10, 2, 8] * 4)]
    async with holding_a(tmp_path, host_pages=200, disk_pages=200) as (worker, router):
        for _ in range(2):
            await asyncio.gather(*(ask(router, prompt) for prompt in prompts))
        assert of_tier(worker, "loaded_pages_total", "host") > 0


class Reused(PageAccess):
    """Pages that get another writer while they are read."""

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        self._access = memory.access(1)

    def read(self, batches: Iterable[Sequence[int]]) -> Iterator[list[memoryview]]:
        for batch in batches:
            for page in batch:
                self._memory.begin_new_generation(PageId(page))
            yield from self._access.read([batch])

    def landing(self, pages: Sequence[int]) -> list[memoryview]:
        return self._access.landing(pages)

    def landed(self) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None:
        self._access.close()


def test_a_copy_of_a_page_that_was_given_away_before_it_or_during_it_counts_for_nothing() -> None:
    memory, target = PageMemory(3, PAGE_BYTES), CopyTarget(np.zeros(PAGE_BYTES, np.uint8), lambda _: None, lambda: None)
    copies = [eviction_copies._PageCopy(BlockHash(bytes(16)), PageId(page), 0, target) for page in range(3)]
    access, reused = memory.access(1), Reused(memory)
    memory.begin_new_generation(PageId(1))
    sound = digest(memory.page(PageId(0)))
    assert eviction_copies._copy(copies, memory, access) == [sound, None, sound]
    assert eviction_copies._copy(copies, memory, reused) == [None, None, None]
    for each in (access, reused):
        each.close()
    memory.close()
