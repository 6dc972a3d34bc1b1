"""Pages that a dead worker left on disk: who takes them in, and when."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from pathlib import Path

import pytest

from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import BLOCK, eventually, prompt_of
from tests.unit.worker.tiers.tiered import (
    BLOCKS,
    MODEL,
    A,
    B,
    C,
    ask,
    bytes_in,
    faulty,
    of_tier,
    on_disk,
    tiered,
    written,
)
from twostroke.kv_cache.tiers.folders import ScannedSegment, SegmentFolder, claim_own
from twostroke.worker.tiers.adoption import adopt_left


async def test_the_pages_of_a_dead_worker_are_taken_in_by_one_with_another_name(tmp_path: Path) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        told = on_disk(worker)
        async with tiered(tmp_path, worker_id="other") as other:
            looking = asyncio.create_task(adopt_left(other.lower.tiers.full, lambda: None, look_s=0.01, unseen_s=0))
            await asyncio.sleep(0.05)
            assert not on_disk(other), "its owner lives"
            looking.cancel()
    async with tiered(tmp_path, worker_id="other") as other, router_to(other) as router:
        looking = asyncio.create_task(adopt_left(other.lower.tiers.full, lambda: None, look_s=0.01, unseen_s=0))
        await eventually(lambda: on_disk(other) == told)
        looking.cancel()
        await ask(router, A)
        assert of_tier(other, "loaded_pages_total") > 0


async def test_the_pages_of_a_dead_worker_are_left_to_one_that_has_room_for_them(tmp_path: Path) -> None:
    async with tiered(tmp_path, worker_id="dead") as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        told, left = on_disk(worker), worker.lower.tiers.full.disk.folder
    async with tiered(tmp_path, disk_pages=12) as full, router_to(full) as router:
        for seed in (11, 12, 13):
            await ask(router, prompt_of(BLOCKS * BLOCK + 3, seed=seed), request_id=f"{seed}")
            await written(full)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(adopt_left(full.lower.tiers.full, lambda: None, look_s=0.01, unseen_s=0), 0.2)
        assert bytes_in(left), "a full worker would remove them"
        async with tiered(tmp_path, worker_id="other") as other:
            looking = asyncio.create_task(adopt_left(other.lower.tiers.full, lambda: None, look_s=0.01, unseen_s=0))
            await eventually(lambda: on_disk(other) == told)
            looking.cancel()
            await asyncio.wait([looking])
        tiers = full.lower.tiers.full
        looking = asyncio.create_task(adopt_left(tiers, lambda: None, look_s=0.01, unseen_s=0, return_s=0.05))
        await eventually(lambda: not bytes_in(left))
        looking.cancel()


async def test_trouble_in_the_folder_of_somebody_else_leaves_the_tier_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with tiered(tmp_path) as worker:
        root = worker.lower.tiers.full.disk.folder.parent
        claim_own(root, "bad").close()
        scan = SegmentFolder.scan

        def failing(folder: SegmentFolder, *args) -> list[ScannedSegment]:
            if folder.path.name == "bad":
                raise OSError(errno.EIO, "the disk is broken there")
            return scan(folder, *args)

        monkeypatch.setattr(SegmentFolder, "scan", failing)
        looking = asyncio.create_task(adopt_left(worker.lower.tiers.full, lambda: None, look_s=0.01, unseen_s=0))
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
        left = worker.lower.tiers.full.disk.folder
    scanning, may_end, scan = threading.Event(), threading.Event(), SegmentFolder.scan

    def slow(folder: SegmentFolder, *args) -> list[ScannedSegment]:
        if folder.path == left:
            scanning.set()
            may_end.wait()
        return scan(folder, *args)

    async with tiered(tmp_path, worker_id="other") as other:
        monkeypatch.setattr(SegmentFolder, "scan", slow)
        looking = asyncio.create_task(adopt_left(other.lower.tiers.full, lambda: None, look_s=0.01, unseen_s=0))
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
        left = worker.lower.tiers.full.disk.folder
        assert bytes_in(left)
    async with tiered(tmp_path, disk_pages=12) as worker, router_to(worker) as router:
        for index, prompt in enumerate((A, B, C)):
            await ask(router, prompt, request_id=f"{index}")
        tiers = worker.lower.tiers.full
        await written(worker)
        with contextlib.suppress(TimeoutError):  # its worker may still come back
            await asyncio.wait_for(adopt_left(tiers, lambda: None, look_s=0.01, unseen_s=0), 0.3)
        assert bytes_in(left) + bytes_in(tiers.disk.folder) > tiers.disk.store.most_bytes
        looking = asyncio.create_task(adopt_left(tiers, lambda: None, look_s=0.01, unseen_s=0, return_s=0.05))
        await eventually(lambda: not left.exists())
        looking.cancel()
        disk = worker.lower.tiers.full.disk
        assert 0 < bytes_in(tmp_path) <= disk.store.most_bytes


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
        disk = worker.lower.tiers.full.disk
        looking = asyncio.create_task(adopt_left(worker.lower.tiers.full, lambda: None, look_s=0.01, unseen_s=0))
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
