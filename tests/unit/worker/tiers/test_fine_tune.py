"""A model that was trained further has files of the same names, sizes and times, and uses no page of its parent."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import xxhash

from tests.unit.engine.tiny import PAGE_BYTES, save_tiny
from twostroke.base.ids import BlockHash
from twostroke.config import CacheConfig, ModelConfig, Role, WorkerConfig
from twostroke.engine.backends.facts import LoadedModel
from twostroke.engine.build import build_runner
from twostroke.kv_cache.tiers.files import AlignedBuffer
from twostroke.kv_cache.tiers.record import HEADER_BYTES, RecordHeader
from twostroke.models.weights import digest
from twostroke.worker.tiers.disk_tier import OpenedDisk
from twostroke.worker.tiers.opening import open_disk

WEIGHTS = "model.safetensors"
BLOCK = BlockHash(bytes(range(16)))


def loaded(model: Path) -> LoadedModel:
    cache = CacheConfig(kv_cache_memory_bytes=8 * PAGE_BYTES)
    settings = ModelConfig(model=str(model), dtype="float32")
    built = build_runner(WorkerConfig(role=Role.DECODE, worker_id="decode-0", model=settings, cache=cache), model)
    built.close()
    return built.model


def opened(pages: Path, model: LoadedModel) -> OpenedDisk:
    disk = open_disk(CacheConfig(disk_cache_bytes=1 << 20, disk_cache_dir=str(pages)), "decode-0", model)
    assert disk is not None
    return disk


def blocks_found(pages: Path, model: LoadedModel) -> list[BlockHash]:
    disk = opened(pages, model)
    disk.own.close()
    return [record.block_hash for segment in disk.found for record in segment.records]


def write_a_page(pages: Path, model: LoadedModel) -> Path:
    disk = opened(pages, model)
    buffer, path = AlignedBuffer(disk.form.record_bytes), disk.own.next_segment()
    page = disk.form.page_of(buffer.view)
    page[:] = b"k" * len(page)
    buffer.view[:HEADER_BYTES] = disk.form.pack(RecordHeader(BLOCK, BLOCK, xxhash.xxh3_64_digest(page)))
    with disk.files.writing(path) as file:
        file.write(buffer.view, 0)
    disk.own.close()
    return path


def train_further(model: Path) -> None:
    """Changes one bit of one weight in place: names, sizes and times of all files stay."""
    path = model / WEIGHTS
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_fine_tune_with_the_same_file_sizes_finds_no_page_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(digest, "SETTLED_S", -1)  # digests are remembered at once, as those of files that are old
    model, pages = save_tiny(tmp_path / "model"), tmp_path / "pages"
    parent = loaded(model)
    segment = write_a_page(pages, parent)
    assert blocks_found(pages, loaded(model)) == [BLOCK], "the same model finds its page"
    train_further(model)
    child = loaded(model)
    assert (child.page_bytes, child.kv_form, child.name) == (parent.page_bytes, parent.kv_form, parent.name)
    assert blocks_found(pages, child) == []
    disk = opened(pages, child)
    disk.own.close()
    shutil.copy(segment, disk.own.path / segment.name)
    assert blocks_found(pages, child) == [], "nor where somebody copies its parent's segments"
    assert blocks_found(pages, parent) == [BLOCK]
