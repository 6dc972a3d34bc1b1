"""Converted pages: made once for all who ask, made anew with the page, and never on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import torch

from twostroke.base.ids import Epoch, PageId
from twostroke.device.memory import DeviceMemory
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kv_cache.form import FORMS, Conversion, KvForm
from twostroke.kv_cache.layout import PageRegion
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.page_forms.page_form import PageShape
from twostroke.transfer.base import Identity, PageCopy, ReadOutcome, digest
from twostroke.transfer.same_host.shm import ShmTransport
from twostroke.worker.page_forms.converted_pages import ConvertedPages

SHAPE = PageShape(2, 3, 16, 64)
CONVERSION = Conversion(KvForm("bfloat16"), KvForm("int8", "bfloat16"), SHAPE, has_pieces=True)
PAGES = 4
PAGE_BYTES = FORMS["bfloat16"].page_bytes(SHAPE)


def content(seed: int) -> torch.Tensor:
    numbers = torch.randn(PAGES, PAGE_BYTES // 2, generator=torch.Generator().manual_seed(seed))
    return numbers.bfloat16().view(torch.uint8)


def right(page: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(CONVERSION.page_bytes, dtype=torch.uint8)
    convert_page(CONVERSION, page, out)
    return out


@contextlib.asynccontextmanager
async def converting(memory: Pages) -> AsyncIterator[tuple[ConvertedPages, ShmTransport]]:
    """The pages that are made of `memory`, and a transport that serves them."""
    transport = ShmTransport()
    pages = ConvertedPages(memory, CONVERSION, [transport])
    await pages.open(Identity("source", Epoch(1, 1), "f;form=int8 from bfloat16", "secret"))
    yield pages, transport
    await pages.close()
    memory.close()


async def test_a_page_is_converted_once_for_all_who_ask_and_anew_when_it_changes() -> None:
    memory = PageMemory(PAGES, PAGE_BYTES)
    first, second = content(1), content(2)
    memory.data[:PAGES] = first.numpy()
    asked = [PageId(2), PageId(0)]
    async with converting(memory) as (pages, _):
        found = await asyncio.gather(*(pages.of(asked) for _ in range(5)))
        assert all(each == found[0] for each in found)
        assert [each for _, each in found[0]] == [digest(right(first[page]).numpy()) for page in asked]
        assert pages.converter.pages == 2
        memory.begin_new_generation(PageId(2))
        memory.data[2] = second[2].numpy()
        (changed, kept), before = await pages.of(asked), found[0]
        assert kept == before[1]
        assert changed[0] != before[0][0], "a reader of the earlier page has to notice"
        assert changed[1] == digest(right(second[2]).numpy())
        assert pages.converter.pages == 3


async def test_pages_and_window_parts_are_each_converted_by_their_group() -> None:
    few = replace(CONVERSION, shape=replace(CONVERSION.shape, layers=1))
    part_bytes = FORMS["bfloat16"].page_bytes(few.shape)
    memory, transport = PageMemory(2, PAGE_BYTES, PageRegion(3, part_bytes)), ShmTransport()
    pages, parts = content(4)[:2], content(5)[:3, :part_bytes]
    memory.regions[0][:2], memory.regions[1][:3] = pages.numpy(), parts.numpy()
    converted = ConvertedPages(memory, replace(CONVERSION, further=(few,)), [transport])
    await converted.open(Identity("source", Epoch(1, 1), "f;form=int8 from bfloat16", "secret"))
    expected = torch.zeros(few.page_bytes, dtype=torch.uint8)
    convert_page(few, parts[2], expected)
    found = await converted.of([PageId(1), PageId(4)])
    assert [each for _, each in found] == [digest(right(pages[1]).numpy()), digest(expected.numpy())]
    assert converted.served_bytes == (PAGE_BYTES + part_bytes, CONVERSION.page_bytes + few.page_bytes)
    await converted.close()
    memory.close()


async def test_who_stops_asking_stops_nobody_else() -> None:
    memory = PageMemory(PAGES, PAGE_BYTES)
    memory.data[:PAGES] = content(3).numpy()
    async with converting(memory) as (pages, _):
        asked = [PageId(page) for page in range(PAGES)]
        waiting = [asyncio.ensure_future(pages.of(asked)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        assert len({tuple(each) for each in await asyncio.gather(*waiting[1:])}) == 1
        assert pages.converter.pages == PAGES


async def test_seconds_per_page_are_known_before_the_first_one_and_bytes_count_every_page_served() -> None:
    memory = PageMemory(PAGES, PAGE_BYTES)
    memory.data[:PAGES] = content(6).numpy()
    async with converting(memory) as (pages, _):
        before_s = pages.converter.page_s
        assert before_s > 0
        for _ in range(2):
            await pages.of([PageId(0), PageId(1)])
        assert pages.converter.page_s != before_s
        assert (pages.converter.pages, pages.served_bytes) == (2, (4 * PAGE_BYTES, 4 * CONVERSION.page_bytes))


async def test_pages_of_a_device_are_converted_through_the_host() -> None:
    memory = DeviceMemory(PAGES, PAGE_BYTES, torch.device("cpu"))
    memory.regions[0][:PAGES] = content(4)
    async with converting(memory) as (pages, _):
        ((_, found),) = await pages.of([PageId(3)])
        assert found == digest(right(content(4)[3]).numpy())


async def test_a_puller_of_that_form_reads_them_and_others_are_refused() -> None:
    memory = PageMemory(PAGES, PAGE_BYTES)
    memory.data[:PAGES] = content(5).numpy()
    target = PageMemory(PAGES, CONVERSION.page_bytes)
    reader = ShmTransport()
    await reader.open(target, Identity("target", Epoch(1, 2), "f;form=int8 from bfloat16", "secret"))
    async with converting(memory) as (pages, _):
        ((generation, expected),) = await pages.of([PageId(1)])
        peer = await reader.connect(pages.endpoints[0], 5.0)
        result = await reader.wait(reader.pull(peer, [PageCopy(PageId(1), PageId(3), generation)], 5.0))
        assert result.outcome is ReadOutcome.DONE
        assert digest(target.page(PageId(3))) == expected
        assert np.array_equal(target.page(PageId(3)), right(content(5)[1]).numpy())
        stale = await reader.wait(reader.pull(peer, [PageCopy(PageId(1), PageId(0), generation - 1)], 5.0))
        assert stale.outcome is ReadOutcome.FAILED
        await reader.close()
    target.close()
