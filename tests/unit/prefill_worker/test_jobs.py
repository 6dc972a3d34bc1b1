"""A prefill worker as page pullers see it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.ready_pages import pages_in
from tests.unit.worker.callers import Puller, router_to
from tests.unit.worker.rig import BLOCK, VOCAB, Running, decode, eventually, expected_tokens, paced, prefill, prompt_of
from twostroke.base.errors import (
    Draining,
    FingerprintMismatch,
    InvalidRequest,
    Overloaded,
    StaleEpoch,
    TransferFailed,
    Unauthenticated,
)
from twostroke.config import ModelConfig, ScheduleConfig
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.transfer.base import digest
from twostroke.worker.steps.engine_check import PROBE_TOKENS

TOKENS = prompt_of(8 * BLOCK)
SLOW = paced(prefill_tokens_per_s=800)
"""20 ms per block."""
BY_BLOCK = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=BLOCK)


@contextlib.asynccontextmanager
async def puller_of(source: Running) -> AsyncIterator[Puller]:
    async with contextlib.aclosing(Puller(source.info)) as puller:
        yield puller


def pinned(source: Running) -> int:
    return source.host.pool.count(PageState.ACTIVE) + source.host.pool.count(PageState.ARRIVING)


async def test_every_announced_page_has_its_generation_and_digest() -> None:
    async with prefill() as source, puller_of(source) as puller:
        messages = await puller.pages(puller.pull(TOKENS), 8)
        pages = pages_in(messages)
        assert [page.block for page in pages] == list(range(8))
        assert sum(message.computed for message in messages) == 8
        for page in pages:
            assert page.generation == source.host.memory.generation(page.page)
            assert page.digest == digest(source.host.memory.page(page.page))


async def test_a_page_that_was_given_to_another_block_is_announced_with_its_new_digest() -> None:
    async with prefill(pages=8) as source, puller_of(source) as puller:
        announced: dict[int, set[tuple[int, bytes]]] = {}
        for seed in (1, 2):
            call = puller.pull(prompt_of(8 * BLOCK, seed=seed))
            for page in pages_in(await puller.pages(call, 8)):
                assert page.digest == digest(source.host.memory.page(page.page))
                announced.setdefault(page.page, set()).add((page.generation, page.digest))
            call.cancel()
            await source.idle()
        assert all(len(generations) == 2 for generations in announced.values()), "every page was announced twice"


async def test_finished_blocks_are_announced_while_later_ones_are_computed() -> None:
    async with prefill(model=SLOW, schedule=BY_BLOCK) as source, puller_of(source) as puller:
        call = puller.pull(TOKENS)
        await puller.pages(call, 1)
        assert source.metric("computed_tokens_total") < len(TOKENS)
        assert len(await puller.pages(call, 7)) >= 4, "one message per finished chunk"


async def test_chunks_end_on_block_boundaries_so_that_every_chunk_can_be_announced() -> None:
    schedule = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=2 * BLOCK + 7)
    async with prefill(schedule=schedule) as source, puller_of(source) as puller:
        messages = await puller.pages(puller.pull(TOKENS), 8)
        assert source.metric("computed_tokens_total") == len(TOKENS)
        assert source.metric("sampled_tokens_total") == 0
        assert len(messages) <= 4


async def test_only_wanted_blocks_are_announced() -> None:
    async with prefill() as source, puller_of(source) as puller:
        messages = await puller.pages(puller.pull(TOKENS, wanted=[2, 5]), 2)
        assert [page.block for page in pages_in(messages)] == [2, 5]
        assert source.metric("computed_tokens_total") == 6 * BLOCK, "blocks after the last wanted one are nobody's"


async def test_equal_blocks_of_two_pulls_are_computed_once() -> None:
    longer = (*TOKENS, *prompt_of(2 * BLOCK, seed=9))
    async with prefill(model=SLOW, schedule=BY_BLOCK) as source, puller_of(source) as puller:
        one, two = puller.pull(TOKENS), puller.pull(longer)
        first, second = await asyncio.gather(puller.pages(one, 8), puller.pages(two, 10))
        assert source.metric("computed_tokens_total") == len(longer)
        assert sum(message.computed for message in (*first, *second)) == 10


async def test_a_block_is_computed_on_for_the_pull_that_is_left() -> None:
    async with prefill(model=SLOW, schedule=BY_BLOCK) as source, puller_of(source) as puller:
        one, two = puller.pull(TOKENS), puller.pull(TOKENS)
        await puller.pages(one, 1)
        await eventually(lambda: source.host.scheduler.running == 2)
        one.cancel()
        await puller.pages(two, 8)
        assert source.metric("computed_tokens_total") == len(TOKENS)


async def test_pages_stay_pinned_while_the_call_is_open_and_are_cached_afterwards() -> None:
    async with prefill() as source, puller_of(source) as puller:
        call = puller.pull(TOKENS)
        await puller.pages(call, 8)
        assert pinned(source) == 8
        assert source.worker._open_work() == 1
        call.cancel()
        await source.idle()
        assert source.host.pool.count(PageState.CACHED) == 8
        messages = await puller.pages(puller.pull(TOKENS), 8)
        assert sum(message.computed for message in messages) == 0


@pytest.mark.parametrize("announced", [0, 3])
async def test_a_pull_that_is_cancelled_frees_everything_within_a_step(announced: int) -> None:
    async with prefill(model=SLOW, schedule=BY_BLOCK) as source, puller_of(source) as puller:
        call = puller.pull(TOKENS)
        await eventually(lambda: source.host.scheduler.running == 1)
        await puller.pages(call, announced)
        call.cancel()
        await source.idle()
        assert source.metric("computed_tokens_total") <= (announced + 2) * BLOCK


async def test_pulls_start_first_come_first_served_and_short_ones_pass_only_so_often() -> None:
    schedule = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=64, max_passes=2)
    async with prefill(pages=10, schedule=schedule) as source, puller_of(source) as puller:
        blocker = puller.pull(prompt_of(6 * BLOCK, seed=1))
        await puller.pages(blocker, 6)
        long = puller.pull(prompt_of(8 * BLOCK, seed=2))
        await eventually(lambda: source.host.scheduler.waiting == 1)
        for seed in (3, 4):
            passing = puller.pull(prompt_of(2 * BLOCK, seed=seed))
            await puller.pages(passing, 2)
            passing.cancel()
            await eventually(lambda: source.worker._open_work() == 2)
        too_many = puller.pull(prompt_of(2 * BLOCK, seed=5))
        await eventually(lambda: source.host.scheduler.waiting == 2)
        served = asyncio.create_task(puller.pages(too_many, 2))
        await asyncio.sleep(0.05)
        assert not served.done(), "the long one has been passed twice: nobody passes it any more"
        blocker.cancel()
        await puller.pages(long, 8)
        await served


async def test_a_full_queue_refuses() -> None:
    schedule = ScheduleConfig(max_num_seqs=1, max_num_batched_tokens=64, max_waiting=1)
    async with prefill(schedule=schedule) as source, puller_of(source) as puller:
        running = puller.pull(TOKENS)
        await puller.pages(running, 8)
        waiting = puller.pull(prompt_of(BLOCK, seed=3))
        await eventually(lambda: source.host.scheduler.waiting == 1)
        refusal = await puller.refusal(puller.pull(prompt_of(BLOCK, seed=4)))
        assert isinstance(refusal, Overloaded)
        running.cancel()
        await puller.pages(waiting, 1)


@pytest.mark.parametrize(
    ("tokens", "changes", "field", "words"),
    [
        (prompt_of(9 * BLOCK), {}, "tokens", f"this pool holds {8 * BLOCK}"),
        (prompt_of(7 * BLOCK), {}, "tokens", f"the model serves {6 * BLOCK}"),
        ((*prompt_of(BLOCK - 1), VOCAB), {}, "tokens", f"up to {VOCAB - 1}, got {VOCAB}"),
        (prompt_of(BLOCK), {"wanted": []}, "wanted", "ascending"),
        (prompt_of(3 * BLOCK), {"wanted": [1, 0]}, "wanted", "ascending"),
        (prompt_of(3 * BLOCK), {"wanted": [1, 1]}, "wanted", "ascending"),
        (prompt_of(2 * BLOCK), {"wanted": [5]}, "wanted", "only 2 block hashes"),
        (prompt_of(2 * BLOCK), {"wanted": [1], "group": 1}, "wanted", "no page group 1"),
        (prompt_of(BLOCK), {"block_hashes": bytes(range(32)), "wanted": [1]}, "tokens", "do not fill 2 blocks"),
        (prompt_of(2 * BLOCK), {"block_hashes": b"x" * 32, "wanted": [1]}, "block_hashes", "a block twice"),
        (prompt_of(BLOCK), {"block_hashes": b"x" * 7}, "block_hashes", "multiple of 16"),
    ],
)
async def test_a_pull_that_can_never_be_served_is_refused_by_field(
    tokens: tuple[int, ...], changes: dict, field: str, words: str
) -> None:
    model = ModelConfig(model=paced().model.replace("max_model_len=4096", f"max_model_len={6 * BLOCK}"))
    async with prefill(pages=8, model=model) as source, puller_of(source) as puller:
        refusal = await puller.refusal(puller.pull(tokens, **changes))
        assert isinstance(refusal, InvalidRequest)
        assert refusal.field == field
        assert words in refusal.message
        assert source.is_idle


async def test_another_life_and_another_fingerprint_are_refused() -> None:
    async with prefill() as source, puller_of(source) as puller:
        assert isinstance(await puller.refusal(puller.pull(TOKENS, source_epoch="9.9")), StaleEpoch)
        refusal = await puller.refusal(puller.pull(TOKENS, fingerprint="model=other"))
        assert isinstance(refusal, FingerprintMismatch)
        assert "model=other" in refusal.message
        assert source.info.fingerprint in refusal.message
        assert source.is_idle


async def test_a_wrong_cluster_token_is_refused() -> None:
    async with prefill() as source, contextlib.aclosing(Puller(source.info, token="guess")) as stranger:
        assert isinstance(await stranger.refusal(stranger.pull(TOKENS)), Unauthenticated)
        assert source.is_idle


async def test_a_draining_source_finishes_open_pulls_and_refuses_new_ones() -> None:
    async with prefill(model=SLOW, schedule=BY_BLOCK) as source, puller_of(source) as puller:
        call = puller.pull(TOKENS)
        await puller.pages(call, 1)
        draining = asyncio.create_task(source.worker.drain(10))
        await eventually(lambda: source.host.validator.is_draining)
        assert isinstance(await puller.refusal(puller.pull(TOKENS)), Draining)
        await puller.pages(call, 7)
        assert not draining.done(), "the pages are still leased"
        call.cancel()
        assert await draining == 0


async def test_a_step_that_fails_by_itself_ends_its_pulls_with_an_error_and_nothing_leaks() -> None:
    async with prefill(model=SLOW, schedule=BY_BLOCK) as source, puller_of(source) as puller:
        one = puller.pull(TOKENS)
        await puller.pages(one, 1)
        two = puller.pull(TOKENS)
        await eventually(lambda: source.host.scheduler.running == 2)
        runner = source.host.engine._runner
        run = runner.run

        failed = []

        def broken(batch):
            if len(batch.tokens) > PROBE_TOKENS and len(failed) < 2:  # as it was planned, and once more by itself
                failed.append(batch)
                raise RuntimeError("device lost")
            return run(batch)

        runner.run = broken
        refusal = await puller.refusal(one)
        assert isinstance(refusal, TransferFailed)
        assert "device lost" in refusal.message
        await puller.pages(two, 8)
        two.cancel()
        await source.idle()


async def test_a_step_that_fails_at_the_source_costs_the_client_nothing() -> None:
    prompt = prompt_of(100)
    async with prefill() as source, decode() as target, router_to(target) as router:
        run, failed = source.host.engine._runner.run, []

        def broken(batch):
            if len(batch.tokens) > PROBE_TOKENS and len(failed) < 2:
                failed.append(batch)
                raise RuntimeError("device lost")
            return run(batch)

        source.host.engine._runner.run = broken
        got = await router.answer(prompt, 5, source=source)
        assert got.tokens == expected_tokens(prompt, 5)
        assert target.metric("pull_failures_total", reason="transfer_failed") == 1
