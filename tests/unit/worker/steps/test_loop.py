"""Settle, plan, submit, tell: while a step runs, the tokens of the one before go out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from decode_worker.worker import DecodeWorker
from tests.trials.chaos.injection.fake_transport import FaultPlan
from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import (
    BLOCK,
    Running,
    decode,
    eventually,
    expected_tokens,
    paced,
    prefill,
    prompt_of,
    worker_config,
)
from tests.unit.worker.test_window_parts import WINDOWED
from twostroke.config import ModelConfig, Role, ScheduleConfig
from twostroke.kv_cache.block import block_hashes_of
from twostroke.rpc.convert import rebuild_error
from twostroke.scheduler.batch import Batch, SampleRow, StepResult

PROMPT = prompt_of(20)


def before_each_step(worker: Running, call: Callable[[int], object]) -> None:
    """`call` gets the step's number, from 0, on the engine thread."""
    runner = worker.host.engine._runner
    run, steps = runner.run, iter(range(10**6))

    def noted(batch: Batch) -> StepResult:
        call(next(steps))
        return run(batch)

    runner.run = noted  # type: ignore[method-assign]


async def test_a_token_goes_out_while_the_next_step_runs() -> None:
    may_go_on = threading.Event()
    async with decode() as worker, router_to(worker) as router:
        before_each_step(worker, lambda step: step != 3 or may_go_on.wait(60))
        got = await router.open(PROMPT, 6)
        await eventually(lambda: len(got.tokens) == 3)
        may_go_on.set()
        await got.done.wait()
        assert got.tokens == expected_tokens(PROMPT, 6)


@pytest.mark.parametrize("held", [Role.DECODE, Role.PREFILL])
async def test_a_request_that_comes_while_a_step_runs_has_its_pages_before_the_step_ends(held: Role) -> None:
    """A worker that is in a step pulls at once what is missing. A page source in a step gives what it has cached."""
    is_running, may_go_on, asked, other = threading.Event(), threading.Event(), PROMPT, prompt_of(20, seed=3)

    def hold(step: int) -> None:
        is_running.set()
        may_go_on.wait(60)

    async with (
        prefill() as source,
        decode() as first,
        decode("decode-1") as second,
        router_to(first) as router,
        router_to(second) as another,
    ):
        if held is Role.PREFILL:
            await another.answer(asked, 2, source=source.source)
        before_each_step(first if held is Role.DECODE else source, hold)
        begun = await router.open(other, 6, request_id="other", source=source.source)
        await eventually(is_running.is_set)
        got = await router.open(asked, 6, request_id="asked", source=source.source)
        hashes = block_hashes_of(asked, BLOCK)
        await eventually(lambda: first.host.pool.hits(hashes) == len(hashes), timeout_s=10)
        assert not got.tokens
        may_go_on.set()
        for answer in (begun, got):
            await answer.done.wait()
        assert got.tokens == expected_tokens(asked, 6)
        assert begun.tokens == expected_tokens(other, 6)


async def test_an_admission_that_fails_while_a_step_runs_ends_the_worker_as_any_other() -> None:
    is_running, may_go_on = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        is_running.set()
        may_go_on.wait(60)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault of an admission")

    with pytest.RaisesGroup(pytest.RaisesExc(ZeroDivisionError, match="of an admission"), flatten_subgroups=True):
        async with decode() as worker, router_to(worker) as router:
            before_each_step(worker, hold)
            await router.open(PROMPT, 6, request_id="first")
            await eventually(is_running.is_set)
            closed, close = asyncio.Event(), worker.role.close
            worker.role.admitted = broken  # type: ignore[attr-defined]
            worker.role.close = lambda: (close(), closed.set())  # type: ignore[method-assign]
            await router.open(prompt_of(20, seed=3), 6, request_id="second")
            may_go_on.set()
            await closed.wait()
            worker.worker._stop.set()


@pytest.mark.parametrize("model", [paced(), WINDOWED], ids=["full attention", "windows"])
async def test_a_step_that_fails_once_is_run_again(model: ModelConfig) -> None:
    """Whatever earlier requests have left in the pages, the engine answers its probe as it did when they were new."""

    def fail(step: int) -> None:
        if step == 3:
            raise RuntimeError("device lost")

    async with decode(model=model, pages=64) as worker, router_to(worker) as router:
        for seed in range(1, 13):
            prompt = prompt_of(8 * BLOCK + 5, seed=seed)
            expected = (await router.answer(prompt, 6, request_id=f"before {seed}")).tokens
        before_each_step(worker, fail)
        got = await router.answer(prompt, 6)
        assert (got.last.error.kind, got.tokens) == ("", expected)


def spoil_tokens(worker: Running, is_corrupt: Callable[[SampleRow], bool]) -> None:
    """Some of the rows have no finite logits."""
    runner = worker.host.engine._runner
    run = runner.run

    def corrupt(batch: Batch) -> StepResult:
        result = run(batch)
        tokens = (
            token._replace(is_sound=not is_corrupt(row))
            for token, row in zip(result.tokens, batch.samples, strict=True)
        )
        return replace(result, tokens=tuple(tokens))

    runner.run = corrupt  # type: ignore[method-assign]


async def test_a_request_whose_numbers_overflow_fails_alone_for_good_and_leaves_nothing_in_the_cache() -> None:
    guilty, innocent = prompt_of(50), prompt_of(50, seed=3)
    async with decode() as worker, router_to(worker) as router:
        spoil_tokens(worker, lambda row: row.params.seed == 13 and row.position >= 53)
        answers = [
            await router.open(guilty, 30, request_id="guilty", seed=13),
            await router.open(innocent, 30, request_id="innocent"),
        ]
        for answer in answers:
            await answer.done.wait()
        assert len(answers[0].tokens) == 3
        assert answers[0].last.error.kind == "NonFiniteLogits"
        assert not rebuild_error(answers[0].last.error.kind, "", None).retryable
        assert answers[1].tokens == expected_tokens(innocent, 30)
        await eventually(lambda: worker.is_idle)
        pool = worker.host.pool
        assert all(pool.find(name) is None for name in block_hashes_of(guilty, BLOCK))
        assert all(pool.find(name) is not None for name in block_hashes_of(innocent, BLOCK))
        pool.check_integrity()


async def test_a_request_that_is_closed_while_its_step_runs_ends_alone() -> None:
    is_running, may_go_on = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        if step == 3:
            is_running.set()
            may_go_on.wait(60)

    async with decode() as worker, router_to(worker) as router:
        before_each_step(worker, hold)
        closed = await router.open(PROMPT, 6, request_id="closed")
        stays = await router.open(prompt_of(20, seed=3), 6, request_id="stays")
        await eventually(is_running.is_set)
        await router.close("closed")
        told = len(closed.tokens)
        may_go_on.set()
        await stays.done.wait()
        assert stays.tokens == expected_tokens(prompt_of(20, seed=3), 6)
        assert len(closed.tokens) == told


async def test_a_life_that_is_cancelled_while_a_step_runs_keeps_the_memory_until_it_has_ended() -> None:
    is_running, ended_s = threading.Event(), 0.0

    def hold(step: int) -> None:
        nonlocal ended_s
        is_running.set()
        time.sleep(0.2)
        ended_s = time.monotonic()

    worker = DecodeWorker(worker_config(Role.DECODE))
    run_task = asyncio.create_task(worker.run())
    running = Running(worker, await worker.ready(), FaultPlan())
    close, closed_s = running.host.memory.close, 0.0

    def closing() -> None:
        nonlocal closed_s
        closed_s = time.monotonic()
        close()

    running.host.memory.close = closing  # type: ignore[method-assign]
    before_each_step(running, hold)
    async with router_to(running) as router:
        await router.open(PROMPT, 6)
        await eventually(is_running.is_set)
        run_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run_task
    assert 0.0 < ended_s <= closed_s


async def test_time_spent_on_prompts_and_what_is_left_of_a_queue_are_told_in_seconds() -> None:
    slow = paced(prefill_tokens_per_s=2000, step_ms=5)
    prompts = [prompt_of(600, seed=seed) for seed in (1, 2)]
    waits = ScheduleConfig(local_prefill=False)
    async with prefill(model=slow) as source, decode(model=slow, schedule=waits) as target, router_to(target) as router:
        begun_s = time.monotonic()
        for number, prompt in enumerate(prompts):
            await router.open(prompt, 4, source=source, request_id=str(number))
        await eventually(lambda: source.host.scheduler.running == 2)
        await eventually(lambda: source.metric("queued_tokens") > 600)
        assert source.metric("queued_seconds") > 0
        before = source.host.load_report()
        assert 0.8 < before.queued_s / (before.queued_tokens / 2000) < 4, "a busy machine makes steps longer"
        await eventually(lambda: all(router.of(str(number)).done.is_set() for number in (0, 1)))
        after = source.host.load_report()
        assert (after.queued_s, after.queued_tokens) == (0.0, 0)
        assert (source.metric("queued_seconds"), source.metric("queued_tokens")) == (0.0, 0.0)
        assert 0.8 * 2 * 592 / 2000 < after.prefill_busy_s < time.monotonic() - begun_s
        assert source.metric("prefill_busy_seconds_total") == pytest.approx(after.prefill_busy_s)
        own = target.host.load_report()
        tails = "two tails of eight tokens, within steps of streams"
        assert 2 * 8 / 2000 * 0.5 < own.prefill_busy_s < after.prefill_busy_s / 2, tails


async def test_what_steps_run_and_make_known_of_each_stream_is_told_to_routers() -> None:
    for speculate, drafts in (("off", False), ("suffix", True)):
        schedule = ScheduleConfig(speculate=speculate, max_num_seqs=4)
        async with decode(schedule=schedule) as worker, router_to(worker) as router:
            for number in range(2):
                got = await router.open(PROMPT, 40, request_id=str(number))
                await got.done.wait()
            each = worker.host.load_report().stream_step
            assert (each.rows > 1.0, each.tokens > 1.0) == (drafts, drafts)
            assert each.rows >= each.tokens
            assert each.before_s == 0.0
