"""A disk that fails, is full, is slow or never answers: its blocks are computed, and nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.worker.callers import Router, router_to
from tests.unit.worker.rig import BLOCK, Running, eventually, prompt_of
from tests.unit.worker.tiers.tiered import (
    SOON_S,
    A,
    B,
    C,
    ask,
    bytes_in,
    faulty,
    of_tier,
    on_disk,
    predict,
    tiered,
    written,
)
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.files import SegmentFile, SegmentFiles
from twostroke.kv_cache.tiers.folders import SegmentFolder
from twostroke.worker.tiers import opening

SHORT = prompt_of(2 * BLOCK + 3, seed=8)


@contextlib.asynccontextmanager
async def with_two_on_disk(folder: Path) -> AsyncIterator[tuple[Running, Router]]:
    """A worker that has all whole blocks of A and SHORT on disk alone."""
    async with tiered(folder, pages=13) as worker, router_to(worker) as router:
        for number, prompt in enumerate((A, SHORT, B, C)):
            await ask(router, prompt, request_id=f"{number}")
        await written(worker)
    async with tiered(folder, pages=40) as worker, router_to(worker) as router:
        assert on_disk(worker) >= {*block_hashes_of(A, BLOCK), *block_hashes_of(SHORT, BLOCK)}
        yield worker, router


def can_be_claimed(root: Path, worker: str) -> bool:
    return all(SegmentFolder.claim(path) is not None for path in root.glob(f"*/{worker}"))


@pytest.mark.parametrize("fault", ["write_errno", "read_errno"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_a_failing_disk_is_turned_off_with_one_warning_and_serving_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, number: int
) -> None:
    faults = faulty(monkeypatch)
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        setattr(faults, fault, number)
        for index in range(3):
            await ask(router, A, request_id=f"a{index}")
            await ask(router, C, request_id=f"c{index}")
        await eventually(lambda: worker.lower.tiers.full.disk is None)
        await written(worker)
        assert not on_disk(worker)
        assert of_tier(worker, "up") == 0
        assert not worker.host.load_report().tiers
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING and "disk tier" in each.message]
    assert [each.message.split(" folder=")[0] for each in warnings] == [
        f"disk tier turned off reason=OSError: [Errno {number}] {os.strerror(number)}"
    ]


async def test_a_disk_that_is_full_at_start_is_read_and_what_it_reclaims_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiered(tmp_path, disk_pages=64) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        told = on_disk(worker)
    most = bytes_in(tmp_path)

    class FullFile(SegmentFile):
        def write(self, buffer: memoryview, offset: int) -> None:
            if bytes_in(tmp_path) + len(buffer) > most:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(buffer, offset)

    class FullFiles(SegmentFiles):
        def open(self, path: Path, flags: int) -> SegmentFile:
            return FullFile(super().open(path, flags)._descriptor)

    monkeypatch.setattr(opening, "SegmentFiles", FullFiles)
    async with tiered(tmp_path, disk_pages=64) as again, router_to(again) as router:
        assert on_disk(again) == told
        await ask(router, A)
        assert of_tier(again, "loaded_pages_total") > 0
        for index in range(4):
            await ask(router, (C, B)[index % 2], request_id=f"{index}")
            await written(again)
        assert of_tier(again, "evicted_pages_total", reason="capacity") > 0
        assert of_tier(again, "written_bytes_total") > 0
        assert of_tier(again, "up") == 1
        assert bytes_in(tmp_path) <= most


async def test_a_full_disk_without_pages_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faulty(monkeypatch).write_errno = errno.ENOSPC
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        assert of_tier(worker, "up") == 0
    assert [each for each in caplog.records if each.message.startswith("disk tier not opened")]


async def test_a_disk_that_is_slower_than_computing_is_not_waited_for_until_it_is_fast_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    faults.read_delay_s = 0.3
    async with tiered(tmp_path, compute_s=SOON_S) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        await ask(router, A, request_id="again")
        assert of_tier(worker, "refused_loads_total") == 1
        assert of_tier(worker, "loaded_pages_total") == 0
        faults.read_delay_s = 0.0
        for index in range(30):
            await ask(router, (B, A)[index % 2], request_id=f"{index}")
            if of_tier(worker, "loaded_pages_total"):
                break
        assert of_tier(worker, "loaded_pages_total") > 0
        assert of_tier(worker, "up") == 1


async def test_a_disk_that_loses_against_computing_stays_on_and_is_seldom_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        predict(worker, SOON_S)
        worker.lower.tiers.full.readers(Tier.DISK).took_at_least(10.0, 1)
        hashes, before = block_hashes_of(A, BLOCK), faults.reads
        held = [block for block, each in enumerate(hashes) if each in on_disk(worker)]
        assert held
        faults.answers.clear()
        try:
            for _ in range(100):
                assert not worker.lower.loads.for_others.share(GroupKind.FULL, hashes, held)
            await eventually(lambda: faults.reads > before)
        finally:
            faults.answers.set()
        assert of_tier(worker, "refused_loads_total") == 100
        assert of_tier(worker, "up") == 1
        assert on_disk(worker)
        assert faults.reads == before + 1, "one probe at a time"


async def test_a_disk_that_becomes_slow_is_given_up_and_its_blocks_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        faults.read_delay_s = 2.0
        predict(worker, SOON_S)
        before = faults.reads
        await ask(router, A, request_id="again")
        assert of_tier(worker, "given_up_loads_total") == 1
        assert faults.reads - before <= 2
        assert of_tier(worker, "page_seconds") > 0


async def test_a_disk_that_never_answers_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = faulty(monkeypatch)
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        faults.answers.clear()
        predict(worker, SOON_S)
        for index in range(3):
            await ask(router, A, request_id=f"a{index}")
            await ask(router, C, request_id=f"c{index}")
        await worker.idle()
        faults.answers.set()


async def test_a_disk_that_never_answers_from_the_start_on_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "ANSWER_S", 0.1)
    faults = faulty(monkeypatch)
    faults.answers.clear()
    try:
        async with asyncio.timeout(60), tiered(tmp_path) as worker, router_to(worker) as router:
            await ask(router, A)
            assert of_tier(worker, "up") == 0
        said = [record.getMessage() for record in caplog.records if "disk tier not opened" in record.getMessage()]
        assert len(said) == 1
        assert "the disk does not answer within 0.1 s" in said[0]
    finally:
        faults.answers.set()
    await eventually(lambda: can_be_claimed(tmp_path, "decode-0"))


async def test_a_disk_that_fails_under_two_threads_is_turned_off_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = faulty(monkeypatch)
    async with with_two_on_disk(tmp_path) as (worker, router):
        before = faults.reads
        faults.answers.clear()
        asked = [asyncio.create_task(ask(router, each, request_id=f"{len(each)}")) for each in (A, SHORT)]
        await eventually(lambda: faults.reads == before + 2)
        faults.read_errno = errno.EIO
        faults.answers.set()
        await asyncio.gather(*asked)
        assert of_tier(worker, "up") == 0
        assert of_tier(worker, "loaded_pages_total") == 0
        worker.host.pool.check_integrity()
    assert sum("turned off" in each.message for each in caplog.records) == 1


async def test_a_short_load_is_done_while_a_long_one_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with with_two_on_disk(tmp_path) as (worker, router):
        before = faults.reads
        faults.answers.clear()
        long = asyncio.create_task(ask(router, A, request_id="long"))
        await eventually(lambda: faults.reads == before + 1)
        held, faults.answers = faults.answers, threading.Event()
        faults.answers.set()
        await ask(router, SHORT, request_id="short")
        assert of_tier(worker, "loaded_pages_total") == len(SHORT) // BLOCK
        assert not long.done()
        held.set()
        await long
        assert of_tier(worker, "given_up_loads_total") == 0


async def test_forgetting_the_cache_removes_the_files_of_a_disk_that_was_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        faults.read_errno = errno.EIO
        await ask(router, A, request_id="again")
        await eventually(lambda: worker.lower.tiers.full.disk is None)
        assert bytes_in(tmp_path) > 0
        worker.lower.tiers.full.forget_all()
        await eventually(lambda: bytes_in(tmp_path) == 0)
