"""Pages that a puller converts: the bits of the source's conversion, by price, and nothing is left of a pull."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.trials.chaos.injection.fake_transport import Delay, Expire, Fail, Fault, FlipByte, WriteLate
from tests.unit.worker.pulls.two_forms import SHAPE, TwoForms, content, two_forms
from tests.unit.worker.rig import eventually
from twostroke.base.errors import TransferFailed
from twostroke.base.ids import PageId
from twostroke.config.cache import KV_FORMATS
from twostroke.device.memory import DeviceMemory
from twostroke.kv_cache.form import Conversion, KvForm
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.layout import PageRegion
from twostroke.kv_cache.memory import PageMemory
from twostroke.worker.page_forms import converting_landing as landing_module
from twostroke.worker.page_forms import page_converter
from twostroke.worker.page_forms.converting_landing import BUFFERS, ConvertingLanding
from twostroke.worker.page_forms.page_converter import ConversionCost, convert, is_for_puller

BLOCKS = 12
TOKENS = list(range(BLOCKS))
PAIRS = [pair for pair in itertools.product(KV_FORMATS, KV_FORMATS) if pair[0] != pair[1]]
SOURCE_PAGE = content(1, "int8").nbytes


async def pulled(workers: TwoForms, *, source_s: float, puller_s: float) -> tuple[npt.NDArray[np.uint8], int]:
    """Returns the pages as they arrive, and how many of them the puller converted."""
    workers.prices(source_s=source_s, puller_s=puller_s)
    pages, task = workers.pull(TOKENS)
    report = await task
    assert report.failure is None
    assert report.pulled == BLOCKS
    assert all(map(workers.target_pool.is_filled, pages))
    found = workers.target.data[pages].copy()
    workers.target_pool.release(pages)
    assert workers.is_quiet
    return found, report.converted


@pytest.mark.parametrize(("source", "target"), PAIRS)
async def test_both_ends_convert_to_the_same_bits(source: str, target: str) -> None:
    transport, found = "tcp" if source < target else "shm", []
    for source_s, puller_s, at_puller in ((1e-6, 1.0, 0), (1.0, 1e-6, BLOCKS)):
        async with two_forms(source, target, transport=transport) as workers:
            workers.compute(TOKENS, content(BLOCKS, source))
            data, converted = await pulled(workers, source_s=source_s, puller_s=puller_s)
            assert (converted, workers.landing.converter.pages) == (at_puller, at_puller)
            assert workers.converted.converter.pages == BLOCKS - at_puller
            found.append(data)
    assert found[0].any()
    assert np.array_equal(*found)


async def test_bytes_are_those_of_the_form_that_travels_and_the_link_is_priced_without_conversions() -> None:
    async with two_forms("int8", "bfloat16") as workers:
        workers.compute(TOKENS, content(BLOCKS, "int8"))
        workers.prices(source_s=1.0, puller_s=1e-6)
        pages, task = workers.pull(TOKENS)
        report = await task
        assert report.copied_bytes == BLOCKS * SOURCE_PAGE
        link = workers.client.links.of(workers.page_source.worker_id)  # type: ignore[arg-type]
        assert link.transfer_s < 1.0
        workers.target_pool.release(pages)


def test_the_cheaper_end_converts_and_near_ties_go_to_the_source() -> None:
    def chosen(source: ConversionCost, puller: ConversionCost, bytes_per_s: float = 20e6) -> bool:
        return is_for_puller(source, puller, 100, bytes_per_s)

    wide, small = ConversionCost(370_000, 4e-4, 0.0, 100), ConversionCost(196_000, 4e-4, 0.0, 100)
    assert chosen(source=wide, puller=small), "from int8 to bfloat16 over a slow link"
    assert not chosen(source=small, puller=wide), "from bfloat16 to int8"
    assert not chosen(wide, wide)
    assert not chosen(wide, small, 1e10), "a few per cent on a fast link"
    assert not chosen(wide, small, 0.0), "nothing is known of the link"
    busy = ConversionCost(196_000, 4e-4, 3.0, 100)
    assert chosen(source=busy, puller=wide), "the source is busy"
    assert not chosen(wide, busy)
    assert not chosen(ConversionCost(370_000, 4e-4, 0.0, 0), small, 1e9), "the source has converted them already"


async def test_pages_that_the_source_has_converted_are_pulled_as_they_are() -> None:
    async with two_forms("float32", "bfloat16") as workers:
        pages = workers.compute(TOKENS, content(BLOCKS, "float32"))
        await workers.converted.of(pages[:8])
        workers.source.begin_new_generation(pages[0])
        way = workers.converted.conversion_cost(BLOCKS, pages[:10])
        assert (way.conversions, way.page_bytes) == (BLOCKS - 7, workers.target.page_bytes)


@pytest.mark.parametrize(
    "fault", [Fail(), Expire(), FlipByte(copy=0, offset=3), WriteLate(), Delay(60.0)], ids=lambda f: type(f).__name__
)
async def test_a_copy_that_fails_leaves_its_blocks_to_others(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing_module, "BUFFER_BYTES", 3 * SOURCE_PAGE)
    async with two_forms("int8", "bfloat16", copy_s=0.25) as workers:
        workers.compute(TOKENS, content(BLOCKS, "int8"))
        workers.prices(source_s=1.0, puller_s=1e-6)
        workers.plan.transfers = {2: fault}
        pages, task = workers.pull(TOKENS)
        report = await task
        assert isinstance(report.failure, TransferFailed)
        assert report.pulled == 6
        pool = workers.target_pool
        assert [pool.is_filled(page) for page in pages] == [True] * 6 + [False] * 6
        assert not any(pool.writer(page) is not None for page in pages)
        again = {block: page for block, page in enumerate(pages) if block >= 6}
        report = await workers.pull_again(TOKENS, again)
        assert report.pulled == report.converted == 6
        pool.release(pages)
        assert workers.is_quiet


async def test_a_page_that_the_source_has_reused_is_not_taken() -> None:
    async with two_forms("int8", "bfloat16") as workers:
        held = workers.compute(TOKENS, content(BLOCKS, "int8"))
        workers.prices(source_s=1.0, puller_s=1e-6)
        announced = landing_module.ConvertingLanding.places

        def reused(landing: ConvertingLanding, pages: list[PageId]) -> Any:
            workers.source.begin_new_generation(held[4])
            return announced(landing, pages)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(landing_module.ConvertingLanding, "places", reused)
            pages, task = workers.pull(TOKENS)
            report = await task
        assert isinstance(report.failure, TransferFailed)
        assert not any(map(workers.target_pool.is_filled, pages))
        workers.target_pool.release(pages)
        assert workers.is_quiet


class SlowConversions:
    """Conversions of which each waits to be let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        patch.setattr(landing_module, "convert", self._convert)

    def _convert(self, *page: Any) -> None:
        self.begun.set()
        assert self.go.wait(60)
        convert(*page)


async def test_a_page_keeps_its_writer_until_the_conversion_into_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowConversions(monkeypatch)
    async with two_forms("int8", "bfloat16") as workers:
        workers.compute(TOKENS, content(BLOCKS, "int8"))
        workers.prices(source_s=1.0, puller_s=1e-6)
        pages, task = workers.pull(TOKENS)
        await eventually(slow.begun.is_set)
        workers.target_pool.release(pages)
        workers.client.prune()
        await asyncio.sleep(0.05)
        assert not task.done()
        assert workers.target_pool.count(PageState.QUARANTINED) == BLOCKS
        assert not workers.is_quiet
        slow.go.set()
        await eventually(lambda: task.done() and workers.is_quiet)
        assert workers.landing.converter.pages == 1, "those that had not begun are dropped"
        workers.target_pool.check_integrity()


async def test_pulls_share_a_memory_of_a_fixed_size_and_beyond_it_the_source_converts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(landing_module, "BUFFER_BYTES", 2 * SOURCE_PAGE)
    slow, pulls = SlowConversions(monkeypatch), []
    async with two_forms("int8", "bfloat16") as workers:
        assert workers.landing._memory.pages == 2 * BUFFERS
        prompts = [[100 * first + token for token in range(4)] for first in range(1, BUFFERS + 3)]
        for prompt in prompts:
            workers.compute(prompt, content(4, "int8", seed=prompt[0]))
        workers.prices(source_s=1.0, puller_s=1e-6)
        pulls += [workers.pull(prompt, session) for session, prompt in enumerate(prompts[: BUFFERS + 1])]
        await eventually(lambda: not workers.landing.has_room)
        await eventually(lambda: workers.plan.pulls == BUFFERS)
        pages, task = workers.pull(prompts[-1], 99)
        report = await task
        assert (report.pulled, report.converted) == (4, 0)
        assert workers.plan.pulls == BUFFERS, "the others wait for their places"
        slow.go.set()
        for (held, done), prompt in zip(pulls, prompts, strict=False):
            report = await done
            assert (report.pulled, report.converted) == (4, 4), prompt
            workers.target_pool.release(held)
        workers.target_pool.release(pages)
        assert workers.is_quiet


async def test_a_source_that_dies_ends_a_pull_that_waits_for_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowConversions(monkeypatch)
    async with two_forms("int8", "bfloat16") as workers:
        workers.compute(TOKENS, content(BLOCKS, "int8"))
        workers.prices(source_s=1.0, puller_s=1e-6)
        pages, task = workers.pull(TOKENS)
        await eventually(slow.begun.is_set)
        await workers.kill_source()
        slow.go.set()
        report = await task
        assert report.pulled in (0, BLOCKS), "what was copied may be used, or not"
        pool = workers.target_pool
        assert all(pool.is_filled(page) or pool.writer(page) is None for page in pages)
        pool.release(pages)
        await eventually(lambda: workers.is_quiet)


async def test_pages_of_a_device_are_filled_through_the_host() -> None:
    conversion = Conversion(KvForm("int8"), KvForm("bfloat16", "int8"), SHAPE, has_pieces=False)
    memory = DeviceMemory(4, conversion.page_bytes, torch.device("cpu"))
    landing = ConvertingLanding(memory, conversion, [])
    original, expected = content(1, "int8")[0], np.zeros(conversion.page_bytes, np.uint8)
    convert(conversion, original, expected)
    async with landing.places([PageId(2)]) as places:
        landing._memory.page(places[0])[:] = original
        landed = await landing.land(places, [PageId(2)])
    assert landed.converted == len(landed.digests) == 1
    assert np.array_equal(memory.regions[0][2].numpy(), expected)
    assert not memory.regions[0][[0, 1, 3]].any()
    await landing.close()
    memory.close()


async def test_window_parts_land_beside_pages_and_are_converted_by_their_group() -> None:
    few = Conversion(KvForm("int8"), KvForm("bfloat16", "int8"), replace(SHAPE, layers=1), has_pieces=False)
    conversion = replace(few, shape=SHAPE, further=(few,))
    memory = PageMemory(4, conversion.page_bytes, PageRegion(3, few.page_bytes))
    landing = ConvertingLanding(memory, conversion, [])
    for each, page, region, row in ((conversion, PageId(1), 0, 1), (few, PageId(6), 1, 2)):
        original, expected = content(1, "int8", shape=each.shape)[0], np.zeros(each.page_bytes, np.uint8)
        convert(each, original, expected)
        async with landing.places([page]) as places:
            landing._memory.page(places[0])[:] = original
            assert (await landing.land(places, [page])).converted == 1
        assert np.array_equal(memory.regions[region][row], expected)
    await landing.close()
    memory.close()


async def test_a_price_that_was_measured_long_ago_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that was too slow once converts nothing, and would never learn that it is quick now."""
    async with two_forms("int8", "bfloat16") as workers:
        workers.compute(TOKENS, content(BLOCKS, "int8"))
        workers.prices(source_s=1e-6, puller_s=60.0)
        pages, task = workers.pull(TOKENS[:2])
        assert (await task).converted == 0
        assert workers.landing.converter.page_s == 60.0
        workers.target_pool.release(pages)
        monkeypatch.setattr(page_converter, "FORGET_S", -1.0)
        pages, task = workers.pull(TOKENS[2:4])
        assert (await task).converted == 0
        await eventually(lambda: workers.landing.converter.page_s < 10.0)
        workers.target_pool.release(pages)
