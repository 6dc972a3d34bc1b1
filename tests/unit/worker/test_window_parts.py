"""Workers of a model whose layers with a window keep their parts of blocks apart: what is moved, kept and forgotten."""

from __future__ import annotations

import contextlib

from tests.unit.worker.callers import Puller, router_to
from tests.unit.worker.pins.test_pins import pin_of, pins_at
from tests.unit.worker.rig import BLOCK, PAGE_BYTES, VOCAB, Running, decode, eventually, prefill, prompt_of
from tests.unit.worker.services.test_fetch import fetch
from twostroke.base.ids import Epoch
from twostroke.config import ModelConfig
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.windows.window_group import WindowGroup, window_group_of

TAIL, BLOCKS = 4, 8
WINDOWED = ModelConfig(
    model=f"paced:prefill_tokens_per_s=1e6,step_ms=1,step_us_per_seq=0,vocab={VOCAB},page_bytes={PAGE_BYTES},"
    f"window={TAIL * BLOCK},max_model_len=512"
)
PROMPT = prompt_of(BLOCKS * BLOCK + 5)
HASHES = block_hashes_of(PROMPT, BLOCK)


def windows_of(worker: Running) -> WindowGroup:
    windows = window_group_of(worker.host.pool)
    assert windows is not None
    return windows


async def test_a_pull_brings_all_pages_and_the_last_window_parts() -> None:
    async with prefill(model=WINDOWED) as source, decode(model=WINDOWED) as worker, router_to(worker) as router:
        fresh = await router.answer(PROMPT, 6)
        await worker.idle()
        worker.host.pool.forget_cached()
        pulled = await router.answer(PROMPT, 6, request_id="pulled", source=source.source)
        assert pulled.tokens == fresh.tokens
        assert worker.metric("pull_bytes_total", transport="shm") == (BLOCKS + TAIL) * PAGE_BYTES
        assert pulled.last.local_tokens == 0
        await worker.idle()
        warm = await router.answer(PROMPT, 6, request_id="warm", source=source.source)
        assert warm.tokens == fresh.tokens
        assert warm.last.local_tokens == BLOCKS * BLOCK
        assert warm.last.cached_tokens == BLOCKS * BLOCK


async def test_a_pull_of_a_window_part_that_no_sequence_keeps_ends_with_an_error() -> None:
    async with prefill(model=WINDOWED) as source, contextlib.aclosing(Puller(source.info)) as puller:
        call = puller.pull(PROMPT[: BLOCKS * BLOCK], wanted=[0, BLOCKS - 1], group=GroupKind.FURTHER)
        assert "not kept in page group 1" in (await puller.refusal(call)).message
        assert source.is_idle


async def test_where_pages_reach_deeper_than_window_parts_only_parts_are_computed_again() -> None:
    async with decode(model=WINDOWED) as worker, router_to(worker) as router:
        fresh = await router.answer(PROMPT, 6)
        await worker.idle()
        windows_of(worker).forget_cached()
        assert worker.host.pool.hits(HASHES) == 0
        pages = [worker.host.pool.find(block_hash) for block_hash in HASHES]
        generations = [worker.host.memory.generation(page) for page in pages if page is not None]
        again = await router.answer(PROMPT, 6, request_id="again")
        assert again.tokens == fresh.tokens
        assert again.last.cached_tokens == 0
        assert [worker.host.pool.find(block_hash) for block_hash in HASHES] == pages
        assert [worker.host.memory.generation(page) for page in pages if page is not None] == generations
        await worker.idle()
        assert worker.host.pool.hits(HASHES) == BLOCKS


async def test_what_a_worker_hands_over_has_the_window_parts_of_its_end() -> None:
    async with (
        decode("leaving", model=WINDOWED) as leaving,
        decode("successor", model=WINDOWED) as successor,
        router_to(leaving) as old,
        router_to(successor) as new,
    ):
        fresh = await old.answer(PROMPT, 6)
        leaving.host.validator.is_draining = True
        assert await fetch(successor, leaving, HASHES) == BLOCKS
        assert windows_of(successor).count(PageState.CACHED) == TAIL
        got = await new.answer(PROMPT, 6)
        assert got.tokens == fresh.tokens
        assert got.last.local_tokens == BLOCKS * BLOCK


async def test_a_pin_keeps_the_last_window_parts_and_brings_them_back() -> None:
    async with decode(model=WINDOWED) as worker, pins_at(worker) as pins:
        pin = pin_of(PROMPT[: BLOCKS * BLOCK])
        await pins.put(pin)
        await eventually(lambda: windows_of(worker).count(PageState.PINNED) == TAIL)
        assert worker.host.pool.hits(HASHES) == BLOCKS
        await worker.idle()
        windows_of(worker).unpin_blocks(windows_of(worker).last_of(HASHES))
        windows_of(worker).forget_cached()
        windows_of(worker).pin_blocks(windows_of(worker).last_of(HASHES))
        await eventually(lambda: windows_of(worker).count(PageState.PINNED) == TAIL)


async def test_a_new_epoch_has_the_cached_window_parts() -> None:
    async with decode(model=WINDOWED) as worker, router_to(worker) as router:
        await router.answer(PROMPT, 2)
        await worker.idle()
        cached = set(windows_of(worker).unheld_blocks())
        assert set(HASHES[-TAIL:]) <= cached
        snapshot = worker.host.engine_state.begin_epoch(Epoch.begin(2)).snapshot()
        assert {
            each for change in snapshot.changes if change.group is GroupKind.FURTHER for each in change.stored
        } == cached
