"""Digests of pages: the same wherever the pages lie, and never computed on the event loop where that takes long."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from twostroke.base.ids import PageId
from twostroke.device.memory import DeviceMemory
from twostroke.kv_cache.form import KvForm
from twostroke.kv_cache.memory import PageMemory
from twostroke.transfer.base import digest
from twostroke.worker.pull_ends import PageDigests
from twostroke.worker.services.pages_service import OwnPages


def digest_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pages-digest")]


def content(pages: int, page_bytes: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (pages, page_bytes), np.uint8)


@pytest.mark.parametrize(("page_bytes", "is_on_thread"), [(100, False), (1 << 20, True)])
async def test_large_host_pages_are_digested_on_a_thread(page_bytes: int, is_on_thread: bool) -> None:
    memory = PageMemory(4, page_bytes)
    memory.data[:4] = expected = content(4, page_bytes)
    digests = PageDigests(memory)
    found = await digests.of([PageId(page) for page in (2, 0, 3)])
    assert found == [digest(expected[page]) for page in (2, 0, 3)]
    assert bool(digest_threads()) == is_on_thread
    await digests.close()
    assert not digest_threads()
    memory.close()


async def test_pages_of_a_device_are_digested_through_the_host() -> None:
    memory = DeviceMemory(5, 300, torch.device("cpu"))
    expected = content(5, 300)
    memory.regions[0][:5] = torch.from_numpy(expected)
    digests = PageDigests(memory)
    assert await digests.of([PageId(page) for page in range(5)]) == [digest(row) for row in expected]
    await digests.close()
    memory.close()


async def test_a_page_that_got_a_new_writer_is_announced_with_the_digest_of_its_new_content() -> None:
    memory = PageMemory(4, 100)
    memory.data[:4] = content(4, 100)
    digests = PageDigests(memory)
    known = OwnPages(KvForm("bfloat16"), memory, digests, ())
    pages = [PageId(1), PageId(3)]
    before = await known.of(pages)
    assert before == [(0, digest(memory.page(page))) for page in pages]
    read = digests.bytes
    assert await known.of(pages) == before
    assert digests.bytes == read, "what is known is not read again"
    memory.begin_new_generation(PageId(3))
    memory.page(PageId(3))[7] ^= 1
    assert await known.of(pages) == [before[0], (1, digest(memory.page(PageId(3))))]
    assert digests.bytes == read + memory.page_bytes
    await digests.close()
    memory.close()
