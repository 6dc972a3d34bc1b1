"""The lock of an adopted folder is closed exactly once, however the adoption and the worker end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import eventually
from tests.unit.worker.tiers.tiered import A, B, ask, on_disk, tiered, written
from twostroke.kv_cache.tiers.folders import SegmentFolder, claim_left
from twostroke.worker.tiers import adoption
from twostroke.worker.tiers.adoption import adopt_left


def locks_open(root: Path) -> int:
    """Descriptors of locks below this folder that are open here, removed ones included."""
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            links.append(os.readlink(each))
    return sum(link.startswith(str(root)) and "/lock" in link for link in links)


@pytest.mark.parametrize("trouble", [None, OSError(errno.EIO, "the disk broke"), RuntimeError("a bug")])
async def test_the_lock_of_an_adopted_folder_is_closed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception | None
) -> None:
    async with tiered(tmp_path) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        left = worker.lower.tiers.full.disk.folder
    assert locks_open(tmp_path) == 0
    closed: list[Path] = []
    close = SegmentFolder.close
    monkeypatch.setattr(SegmentFolder, "close", lambda folder: (closed.append(folder.path), close(folder)))

    def claims_and_fails(*args, **settings) -> Iterator[SegmentFolder]:
        yield from claim_left(*args, **settings)
        raise trouble

    if trouble is not None:
        monkeypatch.setattr(adoption, "claim_left", claims_and_fails)
    async with tiered(tmp_path, worker_id="other") as other:
        looking = asyncio.create_task(adopt_left(other.lower.tiers.full, lambda: None, look_s=0.01, unseen_s=0))
        if trouble is None:
            await eventually(lambda: on_disk(other))
            assert locks_open(tmp_path) == 2
            looking.cancel()
        await asyncio.wait([looking])
        assert closed.count(left) == (trouble is not None)
    assert closed.count(left) == 1
    assert locks_open(tmp_path) == 0
