"""Loads from lower tiers compete with the pull that a router ordered: the sooner one brings the blocks."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.trials.chaos.injection.faulty_files import DiskFaults
from tests.unit.worker.callers import Received, Router, router_to, with_epoch
from tests.unit.worker.rig import BLOCK, Running, decode, expected_tokens, prefill, prompt_of
from tests.unit.worker.tiers.tiered import (
    BLOCKS,
    LONG_S,
    MODEL,
    TOKENS,
    A,
    B,
    ask,
    faulty,
    of_tier,
    predict,
    tiered,
    written,
)
from twostroke.config import Role
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1.worker_pb2 import PageSource, SourceForecast
from twostroke.worker.measured.link_rates import Link
from twostroke.worker.measured.page_time import PageTime
from twostroke.worker.supply.supply import ExpectedPages

HAS_ALL = SourceForecast(cached_blocks=BLOCKS)
COMPUTES_LONG = SourceForecast(wait_s=100.0, compute_s=100.0)
QUICK, SLOW = 1e-4, 0.01
"""Seconds that the disk is said to take for a page."""
QUICK_LINK = Link(latency_s=1e-3, transfer_bytes=1e9, transfer_s=1.0)


def test_blocks_that_the_source_has_come_page_by_page_and_others_as_they_are_computed() -> None:
    link = Link(latency_s=0.01, transfer_bytes=1000, transfer_s=1.0)
    forecast = SourceForecast(cached_blocks=4, fetch_s=0.2, wait_s=0.5, compute_s=6.0)
    expected = ExpectedPages.of_source(forecast, 10, link, 100)
    assert expected is not None
    assert expected.arrival_s([0, 1]) == pytest.approx(0.01 + 0.2 + 2 * 0.1)
    assert expected.arrival_s([1, 4]) == pytest.approx(0.01 + 0.5 + 1.0 + 0.1)
    assert expected.arrival_s([9]) == pytest.approx(0.01 + 0.5 + 6.0 + 0.1)
    assert expected.arrival_s([9, 10]) == math.inf, "a block of the answer so far, which no source has"
    assert expected.batches([2, 3, 5]) == [[2, 3], [5]]
    assert expected.batches([7]) == [[7]]


def test_a_peer_sends_what_it_holds_once_it_has_loaded_that() -> None:
    link = Link(latency_s=0.01, transfer_bytes=1000, transfer_s=1.0)
    expected = ExpectedPages.of_peer(PeerPrefix(PageSource(), 4, load_s=0.3), link, 100)
    assert expected is not None
    assert expected.arrival_s([3]) == pytest.approx(0.01 + 0.3 + 0.1)
    assert expected.arrival_s([4]) == math.inf


def test_nothing_is_expected_over_a_link_that_was_never_measured() -> None:
    assert ExpectedPages.of_source(HAS_ALL, 10, Link(), 100) is None
    assert ExpectedPages.of_peer(PeerPrefix(PageSource(), 4), Link(), 100) is None


def measured(
    monkeypatch: pytest.MonkeyPatch,
    worker: Running,
    *,
    page_s: float,
    compute_s: float = LONG_S,
    link: Link = QUICK_LINK,
) -> None:
    """Lets this be what a worker has measured: beside other work on the machine, real measurements say anything."""
    assert worker.lower.tiers.full.disk is not None
    worker.lower.tiers.full.disk.readers.page_time = PageTime(page_s)
    predict(worker, compute_s)
    monkeypatch.setattr(worker.host.pulls.links, "of", lambda peer: link)


@contextlib.asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[Running, Running, Router]]:
    """A decode worker whose disk has blocks of A that its pages lack, and its page source, which has all of A."""
    async with prefill(model=MODEL) as source, tiered(folder) as worker, router_to(worker) as router:
        await ask(router, A, source=source)
        await ask(router, B, request_id="b", source=source)
        await written(worker)
        yield source, worker, router


@contextlib.contextmanager
def never_answering(faults: DiskFaults) -> Iterator[None]:
    """Lets no read of the disk come back within: one that is late by itself may be on time for a busy worker."""
    faults.answers.clear()
    try:
        yield
    finally:
        faults.answers.set()


async def ask_again(router: Router, source: Running, forecast: SourceForecast | None) -> Received:
    message = router.message(A, TOKENS, request_id="again", source=source, source_forecast=forecast)
    got = await router.send(message)
    async with asyncio.timeout(60):
        await got.done.wait()
    assert got.tokens == expected_tokens(A, TOKENS)
    return got


async def test_what_the_source_has_is_pulled_where_the_disk_is_slower_than_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as (source, worker, router):
        served = source.metric("served_pages_total")
        measured(monkeypatch, worker, page_s=SLOW)
        await ask_again(router, source, HAS_ALL)
        assert of_tier(worker, "loaded_pages_total") == 0
        assert of_tier(worker, "refused_loads_total") == 1
        assert source.metric("served_pages_total") - served >= BLOCKS - 2
        assert of_tier(worker, "up") == 1


@pytest.mark.parametrize("forecast", [COMPUTES_LONG, None])
async def test_what_the_source_would_have_to_compute_is_loaded_and_not_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forecast: SourceForecast | None
) -> None:
    async with pair(tmp_path) as (source, worker, router):
        served = source.metric("served_pages_total")
        measured(monkeypatch, worker, page_s=QUICK)
        await ask_again(router, source, forecast)
        loaded = of_tier(worker, "loaded_pages_total")
        assert loaded >= BLOCKS - 2
        assert source.metric("served_pages_total") - served <= BLOCKS - loaded


async def test_a_load_that_becomes_slow_is_given_up_and_its_blocks_are_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with pair(tmp_path) as (source, worker, router):
        computed, served = worker.metric("computed_tokens_total"), source.metric("served_pages_total")
        measured(monkeypatch, worker, page_s=QUICK, compute_s=0.1)
        with never_answering(faults):
            got = await ask_again(router, source, COMPUTES_LONG)
        assert of_tier(worker, "given_up_loads_total") == 1
        assert source.metric("served_pages_total") - served >= BLOCKS - 2
        assert worker.metric("computed_tokens_total") - computed <= 2 * BLOCK
        assert got.last.cached_tokens <= len(A)


async def test_what_neither_a_given_up_load_nor_its_page_source_brings_is_fetched_from_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with pair(tmp_path) as (holder, worker, router), prefill("gone", model=MODEL) as source:
        await ask(router, prompt_of(BLOCK + 3, seed=7), request_id="measures its link", source=source)
        await ask(router, B, request_id="evicts that", source=holder)
        computed, served = worker.metric("computed_tokens_total"), holder.metric("served_pages_total")
        loaded = of_tier(worker, "loaded_pages_total")
        measured(monkeypatch, worker, page_s=QUICK, compute_s=0.1)
        message = router.message(
            A, TOKENS, request_id="again", source=with_epoch(source.source, "9-9"),
            peer=PeerPrefix(holder.source, BLOCKS), source_forecast=COMPUTES_LONG,
        )  # fmt: skip
        with never_answering(faults):
            got = await router.send(message)
            async with asyncio.timeout(60):
                await got.done.wait()
        assert got.tokens == expected_tokens(A, TOKENS)
        assert of_tier(worker, "given_up_loads_total") == 1
        assert of_tier(worker, "loaded_pages_total") == loaded
        assert holder.metric("served_pages_total") - served >= BLOCKS - 1
        assert worker.metric("computed_tokens_total") - computed <= 2 * BLOCK


async def test_a_damaged_page_on_disk_is_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: DiskFaults = faulty(monkeypatch)
    async with pair(tmp_path) as (source, worker, router):
        computed, served = worker.metric("computed_tokens_total"), source.metric("served_pages_total")
        faults.flips = 1
        measured(monkeypatch, worker, page_s=QUICK)
        await ask_again(router, source, COMPUTES_LONG)
        assert of_tier(worker, "verification_failures_total") == 1
        assert source.metric("served_pages_total") - served >= 1
        assert worker.metric("computed_tokens_total") - computed <= 2 * BLOCK


async def test_a_prefill_worker_pulls_from_its_peer_what_its_disk_has_too_where_that_is_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        prefill("holder", model=MODEL) as holder,
        tiered(tmp_path, role=Role.PREFILL) as source,
        decode(model=MODEL) as target,
        router_to(target) as router,
    ):
        await ask(router, A, source=holder)
        peer = PeerPrefix(holder.source, BLOCKS)
        for number, prompt in enumerate((prompt_of(BLOCK * BLOCKS + 3, seed=1), B, A)):
            target.host.pool.forget_cached()
            measured(monkeypatch, source, page_s=SLOW)
            await ask(router, prompt, request_id=f"{number}", source=source, peer=peer)
            await written(source)
        assert of_tier(source, "hits_total") > 0
        assert of_tier(source, "loaded_pages_total") == 0
