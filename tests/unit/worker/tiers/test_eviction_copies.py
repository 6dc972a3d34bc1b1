"""What a claim evicts is copied before, on a thread: nothing is lost, no long wait, and first blocks come first."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.worker.callers import Received, Router, router_to
from tests.unit.worker.rig import BLOCK, PAGE_BYTES, Running, eventually, prefill, prompt_of
from tests.unit.worker.tiers.tiered import BLOCKS, PAGES, A, B, C, announced, of_tier, tiered, written
from tests.unit.worker.tiers.tiered import ask as ask_as
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.kv_cache.pool import PageState
from twostroke.kv_cache.tier import Tier
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.convert import hashes_to_bytes
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.worker.tiers import eviction_copies, page_tiers

TURN_PAGES = 2
"""Pages that are copied on the event loop in one turn, here."""
CHAINS = {prompt: block_hashes_of(prompt[: BLOCKS * BLOCK], BLOCK) for prompt in (A, B, C)}


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (page_tiers, eviction_copies):
        monkeypatch.setattr(module, "TURN_BYTES", TURN_PAGES * PAGE_BYTES)
    monkeypatch.setattr(eviction_copies, "BATCH_BYTES", 3 * PAGE_BYTES)


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
        assert self.is_open.wait(10)
        return page_tiers.digest(data)


@pytest.fixture
def blockade(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blockade]:
    blockade = Blockade()
    monkeypatch.setattr(eviction_copies, "digest", blockade.digest)
    yield blockade
    blockade.is_open.set()


def check(running: Running) -> None:
    running.host.pool.check_integrity()
    host = running.host.tiers.host
    if host is not None:
        host.store.check_integrity()
        used = len(host.store) + len(host.store._free)
        assert used == host.store.pages, "a page of host memory was lost"


async def test_all_that_a_long_prompt_evicts_is_copied_on_a_thread_and_comes_back(blockade: Blockade) -> None:
    async with tiered(host_pages=100) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B)
        assert blockade.pages >= BLOCKS - TURN_PAGES
        assert blockade.threads == {"tier-copies-0"}
        assert set(CHAINS[A]) <= announced(worker, Tier.HOST)
        before = worker.metric("computed_tokens_total")
        await ask(router, A)
        assert worker.metric("computed_tokens_total") - before < BLOCK
        assert of_tier(worker, "skipped_pages_total", "host", reason="late") == 0
        await worker.idle()
        check(worker)


async def test_where_host_memory_is_short_the_first_blocks_are_kept() -> None:
    async with tiered(host_pages=4) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B)
        assert announced(worker, Tier.HOST) == set(CHAINS[A][:4])
        await worker.idle()
        check(worker)


async def test_where_the_disk_takes_few_pages_it_gets_the_first_blocks(tmp_path: Path) -> None:
    async with tiered(tmp_path, write_mb_s=4 * 4 * PAGE_BYTES / 4e6) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B)
        await written(worker)
        on_disk = [block_hash in announced(worker, Tier.DISK) for block_hash in CHAINS[A]]
        assert any(on_disk)
        assert on_disk == sorted(on_disk, reverse=True), "a block without those before it is of no use"


async def test_a_claim_does_not_wait_longer_than_it_may_and_loses_only_copies(
    blockade: Blockade, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(eviction_copies, "LONGEST_WAIT_S", 0.05)
    async with tiered(host_pages=100) as worker, router_to(worker) as router:
        await ask(router, A)
        blockade.is_open.clear()
        await ask(router, B)
        assert "claim does not wait for copies" in caplog.text
        assert of_tier(worker, "skipped_pages_total", "host", reason="late") > 0
        blockade.is_open.set()
        await worker.idle()
        await eventually(lambda: not worker.host.eviction_copies._waiting)
        check(worker)
        before = worker.metric("computed_tokens_total")
        await ask(router, A)
        assert worker.metric("computed_tokens_total") - before > BLOCK


async def test_what_a_claim_would_evict_can_be_hit_while_it_is_copied_and_short_prompts_pass(
    blockade: Blockade,
) -> None:
    async with tiered(host_pages=100, pages=14) as worker, router_to(worker) as router:
        await ask(router, A)
        blockade.is_open.clear()
        waiting = asyncio.create_task(ask(router, B))
        await eventually(lambda: blockade.pages > 0)
        assert (await ask(router, prompt_of(BLOCK, seed=9))).tokens
        assert worker.host.pool.hits(CHAINS[A]) == BLOCKS
        assert worker.host.pool.count(PageState.ACTIVE) == 0
        assert not waiting.done()
        blockade.is_open.set()
        await waiting
        await worker.idle()
        check(worker)


async def test_a_block_that_is_forgotten_while_it_is_copied_is_not_kept(blockade: Blockade) -> None:
    async with tiered(host_pages=100) as worker, router_to(worker) as router:
        await ask(router, A)
        blockade.is_open.clear()
        waiting = asyncio.create_task(ask(router, B))
        await eventually(lambda: blockade.pages > 0)
        assert worker.host.pool.forget_cached() + worker.host.tiers.forget_all() > 0
        blockade.is_open.set()
        await waiting
        await worker.idle()
        assert not announced(worker, Tier.HOST) & set(CHAINS[A])
        check(worker)


async def test_a_request_that_ends_while_it_waits_leaves_nothing_behind(
    blockade: Blockade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction_copies, "LONGEST_WAIT_S", 0.2)
    async with tiered(host_pages=100) as worker, router_to(worker) as router:
        await ask(router, A)
        blockade.is_open.clear()
        await router.open(B, 4, request_id="left")
        await eventually(lambda: blockade.pages > 0)
        await router.close("left")
        blockade.is_open.set()
        copies = worker.host.eviction_copies
        await eventually(lambda: not copies._waiting and not copies._jobs)
        assert worker.host.pool.hits(CHAINS[A]) == BLOCKS
        check(worker)


async def test_a_request_that_ends_while_its_copies_take_too_long_is_forgotten(
    blockade: Blockade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction_copies, "LONGEST_WAIT_S", 0.1)
    async with tiered(host_pages=100) as worker, router_to(worker) as router:
        await ask(router, A)
        blockade.is_open.clear()
        await router.open(B, 4, request_id="left")
        await eventually(lambda: blockade.pages > 0)
        await router.close("left")
        await eventually(lambda: not worker.host.eviction_copies._jobs)
        blockade.is_open.set()
        await eventually(lambda: not worker.host.eviction_copies._waiting)
        check(worker)


async def test_nothing_is_looked_for_again_and_again_for_a_claim_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tiered(host_pages=100) as worker, router_to(worker) as router:
        await ask(router, A)
        pool, copies, looks = worker.host.pool, worker.host.eviction_copies, itertools.count()
        cached = pool.cached
        monkeypatch.setattr(pool, "cached", lambda: (next(looks), cached())[1])
        private = PAGES - BLOCKS + TURN_PAGES + 1
        for _ in range(3):
            assert copies.may_claim(worker.host.new_session(), CHAINS[A], private)
            assert pool.claim(CHAINS[A], root_hash(), private) is None
            await asyncio.sleep(0)
        assert next(looks) == 0


async def test_of_many_claims_that_wait_one_is_prepared_at_a_time(
    blockade: Blockade, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiered(host_pages=100) as worker, router_to(worker) as router:
        await ask(router, A)
        pool, copies, looks = worker.host.pool, worker.host.eviction_copies, itertools.count()
        cached = pool.cached
        monkeypatch.setattr(pool, "cached", lambda: (next(looks), cached())[1])
        blockade.is_open.clear()
        sessions = [worker.host.new_session() for _ in range(4)]
        assert not any(copies.may_claim(session, CHAINS[B], 0) for session in sessions)
        assert next(looks) == 1
        blockade.is_open.set()
        for session in sessions:
            await copies.ready(session, CHAINS[B], 0)
        assert not copies._jobs
        check(worker)


async def test_a_worker_that_closes_while_pages_are_copied_ends(blockade: Blockade) -> None:
    async with tiered(host_pages=100) as worker, router_to(worker) as router:
        await ask(router, A)
        blockade.is_open.clear()
        waiting = asyncio.create_task(ask(router, B))
        await eventually(lambda: blockade.pages > 0)
        waiting.cancel()
        asyncio.get_running_loop().call_later(0.1, blockade.is_open.set)


async def test_a_fetch_waits_for_the_copies_of_what_it_evicts(blockade: Blockade) -> None:
    async with (
        prefill("leaving") as leaving,
        tiered(host_pages=100) as worker,
        router_to(worker) as router,
    ):
        await ask(router, A)
        await worker.idle()
        blockade.is_open.clear()
        peer = PeerChannel(worker.info.address, worker.host.config.cluster_token)
        source = worker_pb2.PageSource(worker_id="leaving", address=leaving.info.address, epoch=str(leaving.host.epoch))
        request = worker_pb2.FetchRequest(
            fingerprint=worker.host.facts.fingerprint,
            worker_epoch=str(worker.host.epoch),
            source=source,
            block_hashes=hashes_to_bytes(CHAINS[B]),
            root=bytes(16),
            within_s=5,
        )
        fetching = asyncio.ensure_future(
            worker_pb2_grpc.PagesStub(peer.channel).Fetch(request, metadata=peer.metadata, timeout=10)
        )
        await eventually(lambda: blockade.pages > 0)
        assert worker.host.pool.hits(CHAINS[A]) == BLOCKS
        blockade.is_open.set()
        await fetching
        await peer.close()
        assert set(CHAINS[A][1:]) <= announced(worker, Tier.HOST)


async def test_many_prompts_at_once_over_few_pages_get_right_tokens_and_lose_no_page(tmp_path: Path) -> None:
    prompts = [prompt_of(BLOCK * length + 3, seed=seed) for seed, length in enumerate([9, 3, 6, 10, 2, 8] * 4)]
    async with tiered(tmp_path, host_pages=200, disk_pages=200) as worker, router_to(worker) as router:
        for _ in range(2):
            await asyncio.gather(*(ask(router, prompt) for prompt in prompts))
        await worker.idle()
        await written(worker)
        check(worker)
        assert of_tier(worker, "loaded_pages_total", "host") > 0
