"""A worker whose pages come back from disk: right, counted, announced; or are computed where the disk has failed."""

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
from tests.unit.worker.rig import BLOCK, PAGE_BYTES, Running, eventually, paced, prompt_of, worker_config
from tests.unit.worker.tiers.tiered import (
    BLOCKS,
    MODEL,
    A,
    B,
    C,
    ask,
    faulty,
    of_tier,
    on_disk,
    tiered,
    written,
)
from twostroke.config import CacheConfig, Role
from twostroke.errors import ConfigError
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.files import SegmentFile, SegmentFiles
from twostroke.kv_cache.tiers.folders import ScannedSegment, SegmentFolder, claim_own
from twostroke.worker.engine_state import EngineState
from twostroke.worker.tiers import opening
from twostroke.worker.tiers.adoption import adopt_left

SHORT = prompt_of(2 * BLOCK + 3, seed=8)


@contextlib.asynccontextmanager
async def with_two_on_disk(folder: Path, tokens_per_s: float) -> AsyncIterator[tuple[Running, Router]]:
    """A worker that has all whole blocks of A and SHORT on disk alone, and computes at this rate."""
    async with tiered(folder, pages=13) as worker, router_to(worker) as router:
        for number, prompt in enumerate((A, SHORT, B, C)):
            await ask(router, prompt, request_id=f"{number}")
        await written(worker)
    async with (
        tiered(folder, pages=40, model=paced(prefill_tokens_per_s=tokens_per_s)) as worker,
        router_to(worker) as router,
    ):
        assert on_disk(worker) >= {*block_hashes_of(A, BLOCK), *block_hashes_of(SHORT, BLOCK)}
        yield worker, router


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.pages"))


def can_be_claimed(root: Path, worker: str) -> bool:
    return all(SegmentFolder.claim(path) is not None for path in root.glob(f"*/{worker}"))


async def test_what_was_evicted_comes_back_from_disk_instead_of_being_computed(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        before = worker.metric("computed_tokens_total")
        got = await ask(router, A, request_id="again")
        assert of_tier(worker, "loaded_pages_total") >= BLOCKS - 2
        assert worker.metric("computed_tokens_total") - before <= 3 * BLOCK + 8
        assert got.last.cached_tokens >= (BLOCKS - 2) * BLOCK, "what was loaded counts as cached"
        assert of_tier(worker, "saved_seconds_total") > 0
        assert of_tier(worker, "written_bytes_total") > 0
        assert worker.host.load_report().tiers[0].page_s > 0


async def test_a_successor_announces_the_shelf_before_its_first_request_and_serves_from_it(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        told = on_disk(worker)
    assert told
    async with tiered(tmp_path) as again, router_to(again) as router:
        assert on_disk(again) == told
        assert again.host.feed.log.sequence == 1, "the first batch has it all"
        await ask(router, A)
        assert of_tier(again, "loaded_pages_total") > 0


async def test_the_pages_of_a_dead_worker_are_taken_in_by_one_with_another_name(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        told = on_disk(worker)
        async with tiered(tmp_path, worker_id="other") as other:
            looking = asyncio.create_task(adopt_left(other.host.tiers, lambda: None, look_s=0.01, unseen_s=0))
            await asyncio.sleep(0.05)
            assert not on_disk(other), "its owner lives"
            looking.cancel()
    async with tiered(tmp_path, worker_id="other") as other, router_to(other) as router:
        looking = asyncio.create_task(adopt_left(other.host.tiers, lambda: None, look_s=0.01, unseen_s=0))
        await eventually(lambda: on_disk(other) == told)
        looking.cancel()
        await ask(router, A)
        assert of_tier(other, "loaded_pages_total") > 0


async def test_the_pages_of_a_dead_worker_are_left_to_one_that_has_room_for_them(tmp_path: Path) -> None:
    async with tiered(tmp_path, worker_id="dead") as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        told, left = on_disk(worker), worker.host.tiers.disk.folder
    async with tiered(tmp_path, disk_pages=12) as full, router_to(full) as router:
        for seed in (11, 12, 13):
            await ask(router, prompt_of(BLOCKS * BLOCK + 3, seed=seed), request_id=f"{seed}")
            await written(full)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(adopt_left(full.host.tiers, lambda: None, look_s=0.01, unseen_s=0), 0.2)
        assert bytes_in(left), "a full worker would remove them"
        async with tiered(tmp_path, worker_id="other") as other:
            looking = asyncio.create_task(adopt_left(other.host.tiers, lambda: None, look_s=0.01, unseen_s=0))
            await eventually(lambda: on_disk(other) == told)
            looking.cancel()
            await asyncio.wait([looking])
        tiers = full.host.tiers
        looking = asyncio.create_task(adopt_left(tiers, lambda: None, look_s=0.01, unseen_s=0, return_s=0.05))
        await eventually(lambda: not bytes_in(left))
        looking.cancel()


async def test_trouble_in_the_folder_of_somebody_else_leaves_the_tier_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with tiered(tmp_path) as worker:
        root = worker.host.tiers.disk.folder.parent
        claim_own(root, "bad").close()
        scan = SegmentFolder.scan

        def failing(folder: SegmentFolder, *args) -> list[ScannedSegment]:
            if folder.path.name == "bad":
                raise OSError(errno.EIO, "the disk is broken there")
            return scan(folder, *args)

        monkeypatch.setattr(SegmentFolder, "scan", failing)
        looking = asyncio.create_task(adopt_left(worker.host.tiers, lambda: None, look_s=0.01, unseen_s=0))
        await eventually(lambda: sum("cannot be read" in each.message for each in caplog.records) >= 2)
        looking.cancel()
        assert of_tier(worker, "up") == 1
        monkeypatch.undo()
        await eventually(lambda: SegmentFolder.claim(root / "bad") is not None)


async def test_a_cancelled_look_leaves_what_it_claims_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        left = worker.host.tiers.disk.folder
    scanning, may_end, scan = threading.Event(), threading.Event(), SegmentFolder.scan

    def slow(folder: SegmentFolder, *args) -> list[ScannedSegment]:
        if folder.path == left:
            scanning.set()
            may_end.wait()
        return scan(folder, *args)

    async with tiered(tmp_path, worker_id="other") as other:
        monkeypatch.setattr(SegmentFolder, "scan", slow)
        looking = asyncio.create_task(adopt_left(other.host.tiers, lambda: None, look_s=0.01, unseen_s=0))
        await eventually(scanning.is_set)
        looking.cancel()
        await asyncio.wait([looking])
        assert SegmentFolder.claim(left) is None, "the thread has it"
        may_end.set()
        await eventually(lambda: SegmentFolder.claim(left) is not None)


async def test_pages_of_another_model_and_our_own_take_no_more_than_the_disk_may(tmp_path: Path) -> None:
    other = MODEL.replace(model=MODEL.model.replace("vocab=2048", "vocab=4096"))
    async with tiered(tmp_path, model=other) as worker, router_to(worker) as router:
        for index, prompt in enumerate((A, B)):
            await router.answer(prompt, 4, request_id=f"{index}")
        await written(worker)
        left = worker.host.tiers.disk.folder
        assert bytes_in(left)
    async with tiered(tmp_path, disk_pages=12) as worker, router_to(worker) as router:
        for index, prompt in enumerate((A, B, C)):
            await ask(router, prompt, request_id=f"{index}")
        tiers = worker.host.tiers
        await written(worker)
        with contextlib.suppress(TimeoutError):  # its worker may still come back
            await asyncio.wait_for(adopt_left(tiers, lambda: None, look_s=0.01, unseen_s=0), 0.3)
        assert bytes_in(left) + bytes_in(tiers.disk.folder) > tiers.disk.store.most_bytes
        looking = asyncio.create_task(adopt_left(tiers, lambda: None, look_s=0.01, unseen_s=0, return_s=0.05))
        await eventually(lambda: not left.exists())
        looking.cancel()
        disk = worker.host.tiers.disk
        assert 0 < bytes_in(tmp_path) <= disk.store.most_bytes


async def test_blocks_of_another_model_are_not_found(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        assert on_disk(worker)
    other = worker.host.config.model.replace(model=worker.host.config.model.model.replace("vocab=2048", "vocab=4096"))
    async with tiered(tmp_path, model=other) as worker:
        assert not on_disk(worker)


async def test_the_disk_never_takes_more_than_it_may_and_routers_know_what_went(tmp_path: Path) -> None:
    async with tiered(tmp_path, disk_pages=12) as worker, router_to(worker) as router:
        disk = worker.host.tiers.disk
        for seed in range(8):
            await ask(router, prompt_of(BLOCKS * BLOCK + 3, seed=seed), request_id=f"{seed}")
            await written(worker)
            assert on_disk(worker) == set(disk.store)
        assert 0 < bytes_in(tmp_path) <= disk.store.most_bytes
        assert of_tier(worker, "evicted_pages_total", reason="capacity") > 0
        assert of_tier(worker, "eviction_age_seconds_count") == of_tier(
            worker, "evicted_pages_total", reason="capacity"
        )


async def test_a_small_budget_is_kept_for_blocks_that_were_wanted_twice(tmp_path: Path) -> None:
    async with tiered(tmp_path, write_mb_s=0.001) as worker, router_to(worker) as router:
        for seed in range(4):
            await ask(router, prompt_of(BLOCKS * BLOCK + 3, seed=seed), request_id=f"{seed}")
        assert not on_disk(worker)
        assert of_tier(worker, "skipped_pages_total", reason="budget") > 0
        await ask(router, prompt_of(BLOCKS * BLOCK + 3, seed=3), request_id="again")
        await written(worker)
        assert len(on_disk(worker)) == 1, "the page that the budget had room for"


async def test_a_disk_with_room_for_one_page_is_refused_with_the_numbers(tmp_path: Path) -> None:
    cache = CacheConfig(kv_cache_memory_bytes=4 * PAGE_BYTES, disk_cache_bytes=30_000, disk_cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="--disk-cache 30000 holds 1 pages of 20480 bytes; at least 2 are needed"):
        await EngineState.load(worker_config(Role.DECODE).replace(cache=cache))


async def test_a_flipped_bit_is_a_counted_miss_and_its_record_never_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        faults.flips = 1
        await ask(router, A, request_id="again")
        assert of_tier(worker, "verification_failures_total") == 1
        assert of_tier(worker, "evicted_pages_total", reason="damaged") == 1
        await written(worker)
        kept = on_disk(worker)
    async with tiered(tmp_path) as again:
        assert on_disk(again) == kept


async def test_a_buried_record_does_not_come_back_from_the_folder_of_a_dead_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faulty(monkeypatch)
    for worker_id, prompts in (("first", (A, B, C)), ("second", (A, B))):
        async with tiered(tmp_path, worker_id=worker_id) as worker, router_to(worker) as router:
            for index, prompt in enumerate(prompts):
                await ask(router, prompt, request_id=f"{index}")
            await written(worker)
    async with tiered(tmp_path, worker_id="second") as worker, router_to(worker) as router:
        disk = worker.host.tiers.disk
        looking = asyncio.create_task(adopt_left(worker.host.tiers, lambda: None, look_s=0.01, unseen_s=0))
        await eventually(lambda: len(disk._folders) == 2)
        looking.cancel()
        faults.flips = 1
        await ask(router, A, request_id="again")
        assert of_tier(worker, "evicted_pages_total", reason="damaged") == 1
        await written(worker)
        kept = on_disk(worker)
    for worker_id in ("second", "first"):
        async with tiered(tmp_path, worker_id=worker_id) as again:
            assert on_disk(again) <= kept


async def test_no_dead_record_is_written_for_a_segment_that_has_gone(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        disk = worker.host.tiers.disk
        for path in disk.folder.glob("*.pages"):
            path.unlink()
        for block_hash in list(disk.store):
            assert disk.bury(block_hash)
        await disk.wait_idle()
        assert not list(disk.folder.glob("*.pages"))


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
        await eventually(lambda: worker.host.tiers.disk is None)
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
    slow = paced(prefill_tokens_per_s=300)  # a stall of the disk is no reason to compute
    async with tiered(tmp_path, disk_pages=64, model=slow) as worker, router_to(worker) as router:
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
    async with tiered(tmp_path, disk_pages=64, model=slow) as again, router_to(again) as router:
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
    faults.read_delay_s = 0.1
    async with tiered(tmp_path) as worker, router_to(worker) as router:
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
        worker.host.tiers.took_at_least(Tier.DISK, 10.0, 1)
        hashes, before = block_hashes_of(A, BLOCK), faults.reads
        held = [block for block, each in enumerate(hashes) if each in on_disk(worker)]
        assert held
        faults.answers.clear()
        try:
            for _ in range(100):
                assert not worker.host.loads.share(hashes, held)
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
        faults.read_delay_s = 0.1
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
        async with asyncio.timeout(10), tiered(tmp_path) as worker, router_to(worker) as router:
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
    async with with_two_on_disk(tmp_path, 100) as (worker, router):
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
    async with with_two_on_disk(tmp_path, 10) as (worker, router):  # the long load is late after 1.6 s
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


async def test_one_load_serves_all_who_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = faulty(monkeypatch)
    async with tiered(tmp_path, pages=40) as worker, router_to(worker) as router:
        await ask(router, A)
        for seed in range(10, 14):
            await ask(router, prompt_of(BLOCKS * BLOCK + 3, seed=seed), request_id=f"{seed}")
        await written(worker)
        before = faults.reads
        await asyncio.gather(*(ask(router, A, request_id=f"a{index}") for index in range(12)))
        assert 0 < faults.reads - before <= BLOCKS
        assert of_tier(worker, "loaded_pages_total") == faults.reads - before


async def test_forgetting_the_cache_forgets_the_disk_too(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        forgotten = on_disk(worker)
        assert worker.host.tiers.forget_all() == len(forgotten) > 0
        worker.host.pool.forget_cached()
        await ask(router, A, request_id="again")
        assert of_tier(worker, "loaded_pages_total") == 0
    async with tiered(tmp_path) as again:
        assert not on_disk(again) & forgotten
