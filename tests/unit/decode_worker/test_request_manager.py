"""A decode worker as routers see it: requests opened, answered, closed, late, preempted, failed."""

from __future__ import annotations

import asyncio
import time

import grpc.aio
import pytest

from decode_worker.request_manager import RequestManager
from decode_worker.request_state import Stage
from tests.trials.chaos.injection.fake_transport import Delay, FaultPlan
from tests.unit.worker.callers import Router, router_to
from tests.unit.worker.rig import (
    BLOCK,
    Running,
    answers_of,
    decode,
    eventually,
    expected_tokens,
    paced,
    prefill,
    prompt_of,
)
from twostroke.base.errors import (
    Draining,
    FingerprintMismatch,
    InvalidRequest,
    NotFound,
    ServeError,
    StaleEpoch,
    Unauthenticated,
)
from twostroke.base.ids import RequestId
from twostroke.config import ScheduleConfig
from twostroke.worker.steps.engine_check import PROBE_TOKENS

PROMPT = prompt_of(100)
STEADY = paced(step_ms=10)
"""A token every 10 ms: time to do something between two of them."""


def held_pages(worker: Running) -> int:
    return worker.host.pool.total - worker.host.pool.available


# Open and Tokens


async def test_the_answer_comes_in_order_and_ends_with_its_reason() -> None:
    async with decode() as worker, router_to(worker) as router:
        got = await router.answer(PROMPT, 20)
        assert got.tokens == expected_tokens(PROMPT, 20)
        assert got.positions == list(range(20))
        assert [entry.finish_reason for entry in got.entries[:-1]] == [""] * (len(got.entries) - 1)
        assert got.last.finish_reason == "length"
        instants = got.last.lifetime
        assert instants["opened"] <= instants["admitted"] <= instants["first_token"] <= instants["done"]
        assert got.entries[0].lifetime["first_token"] == instants["first_token"]


async def test_one_message_per_step_carries_the_tokens_of_all_requests_of_a_router() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as router, router_to(worker, "other") as other:
        mine = [await router.open(prompt_of(40, seed=i), 12, request_id=f"mine-{i}") for i in range(4)]
        theirs = await other.open(PROMPT, 12, request_id="theirs")
        await asyncio.gather(*(answer.done.wait() for answer in [*mine, theirs]))
        for batch in router.batches:
            names = [entry.request_id for entry in batch]
            assert len(set(names)) == len(names)
            assert "theirs" not in names
        full = [batch for batch in router.batches if len(batch) == 4]
        assert len(full) >= 8, "steps of all four were told in one message each"
        assert len(router.batches) < 4 * 12
        assert {entry.request_id for batch in other.batches for entry in batch} == {"theirs"}


async def test_a_request_goes_on_after_tokens_that_an_earlier_worker_emitted() -> None:
    whole = expected_tokens(PROMPT, 30)
    async with decode() as worker, router_to(worker) as router:
        got = await router.answer(PROMPT, 30, emitted=whole[:13], attempt=2)
        assert got.tokens == whole[13:]
        assert got.positions == list(range(13, 30))


async def test_a_later_attempt_replaces_an_earlier_one() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as router:
        first = await router.open(PROMPT, 200, attempt=0)
        await eventually(lambda: len(first.tokens) > 1)
        second = await router.answer(PROMPT, 6, attempt=1)
        assert second.tokens == expected_tokens(PROMPT, 6)
        assert worker.role.open_requests == 0
        told = len(first.tokens)
        await router.answer([1, 2, 3], 3, request_id="another")
        assert len(first.tokens) == told, "the earlier attempt is silent"


async def test_a_later_attempt_takes_the_place_of_an_earlier_one_in_a_full_queue() -> None:
    schedule = ScheduleConfig(max_num_seqs=1, max_num_batched_tokens=64, max_waiting=1)
    async with decode(schedule=schedule, model=STEADY) as worker, router_to(worker) as router:
        running = await router.open(PROMPT, 30, request_id="running")
        await eventually(lambda: worker.host.scheduler.running == 1)
        await router.open(PROMPT, 4, attempt=0)
        second = await router.open(PROMPT, 4, attempt=1)
        await asyncio.gather(running.done.wait(), second.done.wait())
        assert second.tokens == expected_tokens(PROMPT, 4)


@pytest.mark.parametrize("attempt", [3, 2])
async def test_a_duplicate_or_late_attempt_is_refused_and_harms_nobody(attempt: int) -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as router:
        got = await router.open(PROMPT, 10, attempt=3)
        with pytest.raises(InvalidRequest, match="open already, as attempt 3") as refusal:
            await router.open(PROMPT, 10, attempt=attempt)
        assert refusal.value.field == "request_id"
        await got.done.wait()
        assert got.tokens == expected_tokens(PROMPT, 10)


async def test_a_close_of_an_attempt_that_has_not_come_ends_no_earlier_one() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as router:
        got = await router.open(PROMPT, 10, attempt=1)
        await router.close(attempt=2)
        assert worker.role.open_requests == 1
        await got.done.wait()
        assert got.tokens == expected_tokens(PROMPT, 10)


async def test_an_id_can_be_used_again_once_its_answer_has_ended() -> None:
    """A restarted router counts attempts from the start again, while the ended answer is still kept for attaching."""
    async with decode() as worker, router_to(worker) as router:
        first = await router.answer(PROMPT, 6, request_id="same", attempt=5)
        again = await router.answer(PROMPT, 6, request_id="same", attempt=1)
        assert again.tokens == first.tokens == expected_tokens(PROMPT, 6)


async def test_another_life_is_refused_and_counted() -> None:
    async with decode() as worker, router_to(worker) as router:
        with pytest.raises(StaleEpoch, match=f"{worker.info.epoch}.*7.7"):
            await router.open(PROMPT, worker_epoch="7.7")
        assert worker.metric("stale_epochs_total") == 1
        assert worker.is_idle


async def test_another_fingerprint_is_refused_with_both_values() -> None:
    async with decode() as worker, router_to(worker) as router:
        with pytest.raises(FingerprintMismatch) as refusal:
            await router.open(PROMPT, fingerprint="model=other")
        assert "model=other" in refusal.value.message
        assert worker.info.fingerprint in refusal.value.message
        assert worker.is_idle


async def test_a_wrong_cluster_token_is_refused_on_every_call() -> None:
    async with decode() as worker:
        stranger = Router(worker.info, token="guess")
        for call in (stranger.open(PROMPT), stranger.close(), stranger.attach(from_position=0)):
            with pytest.raises(Unauthenticated):
                await call
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stranger.connect()
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await stranger.aclose()


async def test_a_draining_worker_takes_no_new_request_but_finishes_open_ones() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as router:
        got = await router.open(PROMPT, 20)
        draining = asyncio.create_task(worker.worker.drain(10))
        await eventually(lambda: worker.host.validator.is_draining)
        with pytest.raises(Draining):
            await router.open(PROMPT, request_id="late")
        assert await draining == 0
        await got.done.wait()
        assert got.tokens == expected_tokens(PROMPT, 20)


# Close


@pytest.mark.parametrize("when", ["waiting", "running", "done"])
async def test_close_frees_everything_at_once(when: str) -> None:
    schedule = ScheduleConfig(max_num_seqs=1, max_num_batched_tokens=64)
    async with decode(schedule=schedule, model=STEADY) as worker, router_to(worker) as router:
        other = None
        if when == "waiting":
            other = await router.open(prompt_of(30, seed=2), 10, request_id="other")
            await eventually(lambda: worker.host.scheduler.running == 1)
        got = await router.open(PROMPT, 3 if when == "done" else 300)
        match when:
            case "waiting":
                await eventually(lambda: worker.host.scheduler.waiting == 1)
            case "running":
                await eventually(lambda: len(got.tokens) > 2)
            case "done":
                await got.done.wait()
        await router.close()
        if other is not None:
            await other.done.wait()
        assert "r" not in worker.role._requests
        await worker.idle()
        with pytest.raises(NotFound):
            await router.attach(from_position=0)


@pytest.mark.parametrize("when", [Stage.WAITING, Stage.PULLING, Stage.RUNNING, "preempted"])
async def test_what_a_closed_request_held_is_back_when_the_step_that_runs_has_ended(when: Stage | str) -> None:
    by_block = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=BLOCK)
    async with (
        prefill(model=paced(prefill_tokens_per_s=400), schedule=by_block) as source,
        decode(pages=12, model=STEADY) as worker,
        router_to(worker) as router,
    ):
        manager, other = answers_of(worker), "first"
        if when in (Stage.WAITING, "preempted"):
            await router.open(prompt_of(9 * BLOCK, seed=2), 40, request_id=other)
            await eventually(lambda: worker.host.scheduler.running == 1)
        prompt = prompt_of(BLOCK, seed=3) if when == "preempted" else PROMPT
        await router.open(prompt, 30, source=source if when is Stage.PULLING else None)
        answer = manager._requests[RequestId("r")]
        stage = Stage.WAITING if when == "preempted" else when
        await eventually(lambda: answer.stage is stage and bool(answer.sequence.preemptions) == (when == "preempted"))
        if when is Stage.PULLING:
            await eventually(lambda: worker.metric("pull_bytes_total", transport="shm") > 0)
        for request_id in ("r", other):
            manager.close_request(RequestId(request_id), 0)
        steps = ran_steps(worker)
        await worker.idle()
        assert ran_steps(worker) <= steps + 1
        await eventually(lambda: not source.worker._open_work())
        steps = ran_steps(source)
        await source.idle()
        assert ran_steps(source) <= steps + 1


def ran_steps(worker: Running) -> float:
    return sum(worker.metric("step_seconds_count", kind=kind) for kind in ("prefill", "decode"))


async def test_closing_an_earlier_attempt_or_nothing_at_all_is_no_error_and_changes_nothing() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as router:
        got = await router.open(PROMPT, 10, attempt=1)
        await router.close(attempt=0)
        await router.close("nobody")
        await got.done.wait()
        assert got.tokens == expected_tokens(PROMPT, 10)


# Deadlines


async def test_a_deadline_that_passes_while_running_ends_in_an_error_entry() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as router:
        got = await router.answer(PROMPT, 1500, deadline_s=time.time() + 0.2)
        assert got.last.error.kind == "DeadlineExceeded"
        assert got.last.finish_reason == "error"
        assert got.tokens == expected_tokens(PROMPT, len(got.tokens))
        assert got.last.position + len(got.last.tokens) == len(got.tokens), "a token may come with the end"


async def test_a_deadline_that_passes_while_waiting_ends_in_an_error_entry() -> None:
    schedule = ScheduleConfig(max_num_seqs=1, max_num_batched_tokens=64)
    async with decode(schedule=schedule, model=STEADY) as worker, router_to(worker) as router:
        busy = await router.open(PROMPT, 60, request_id="busy")
        await eventually(lambda: worker.host.scheduler.running == 1)
        got = await router.answer(PROMPT, 5, deadline_s=time.time() + 0.15)
        assert got.last.error.kind == "DeadlineExceeded"
        assert not got.tokens
        assert worker.host.scheduler.waiting == 0
        await busy.done.wait()
        assert busy.tokens == expected_tokens(PROMPT, 60)


async def test_a_deadline_that_passes_while_pulling_frees_both_sides() -> None:
    async with (
        prefill(model=paced(prefill_tokens_per_s=100)) as source,
        decode() as worker,
        router_to(worker) as router,
    ):
        got = await router.answer(PROMPT, 5, source=source, deadline_s=time.time() + 0.2)
        assert got.last.error.kind == "DeadlineExceeded"
        await worker.idle()
        await eventually(lambda: source.worker._open_work() == 0)


async def test_a_request_that_is_closed_while_its_pages_come_is_pulled_no_further() -> None:
    plan = FaultPlan(every_transfer=Delay(60.0))
    async with prefill() as source, decode(plan=plan) as worker, router_to(worker) as router:
        await router.open(PROMPT, 5, source=source)
        await eventually(lambda: plan.pulls == 1)
        await router.close()
        await eventually(lambda: worker.is_idle and source.is_idle, timeout_s=20.0)


async def test_the_deadline_of_an_answer_that_has_ended_changes_nothing() -> None:
    async with decode() as worker, router_to(worker) as router:
        ends_s = time.time() + 1.0
        got = await router.answer(PROMPT, 3, deadline_s=ends_s)
        assert got.last.finish_reason == "length"
        await asyncio.sleep(max(0.0, ends_s + 0.1 - time.time()))
        (state,) = worker.role._requests.values()
        assert (state.finish, state.error) == ("length", None)


async def test_a_pull_ends_at_its_source_by_its_requests_deadline_whoever_forgets_to_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decode worker seems to stand still: nothing here closes the call."""
    monkeypatch.setattr(RequestManager, "_expire", lambda manager, answer: None)
    prompt = prompt_of(50 * BLOCK)
    slow = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=BLOCK)
    async with (
        prefill(model=paced(prefill_tokens_per_s=400), schedule=slow) as source,
        decode() as worker,
        router_to(worker) as router,
    ):
        got = await router.answer(prompt, 5, source=source, deadline_s=time.time() + 0.5)
        assert worker.metric("pull_failures_total", reason="deadline_exceeded") == 1
        assert got.tokens == expected_tokens(prompt, 5), "what is missing is computed by whoever still wants it"
        await source.idle()
        assert source.metric("computed_tokens_total") < len(prompt) / 2, "computing went on for nobody"


# When pages or the engine fail


@pytest.mark.parametrize("is_split", [False, True])
async def test_preempted_requests_go_on_with_the_same_tokens(is_split: bool) -> None:
    prompts = [prompt_of(40, seed=i) for i in range(4)]
    async with prefill() as prefiller, decode(pages=20) as worker, router_to(worker) as router:
        source = prefiller if is_split else None
        answers = [await router.open(prompt, 80, request_id=str(i), source=source) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert worker.metric("preemptions_total") > 0
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == expected_tokens(prompt, 80)
            assert answer.last.cached_tokens == 0, "what came back after preemption is not reuse"


async def test_a_request_that_is_preempted_while_pulling_goes_on_with_the_same_tokens() -> None:
    slow = paced(prefill_tokens_per_s=400)
    old, new = prompt_of(31, seed=1), prompt_of(8 * BLOCK + 5, seed=2)
    schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=BLOCK)
    async with (
        prefill(model=slow, schedule=schedule) as source,
        decode(pages=12, model=paced(step_ms=2)) as worker,
        router_to(worker) as router,
    ):
        growing = await router.open(old, 100, request_id="growing")
        pulling = await router.open(new, 10, request_id="pulling", source=source)
        await eventually(lambda: worker.metric("preemptions_total") > 0)
        assert not pulling.tokens, "it had begun to run before room became scarce"
        await asyncio.gather(growing.done.wait(), pulling.done.wait())
        assert growing.tokens == expected_tokens(old, 100)
        assert pulling.tokens == expected_tokens(new, 10)
        await source.idle()


async def test_a_request_that_is_preempted_in_the_plan_that_admitted_it_leaves_nothing_behind() -> None:
    async with prefill() as source, decode(pages=11, model=paced(step_ms=3)) as worker, router_to(worker) as router:
        growing = await router.open(prompt_of(31, seed=1), 130, request_id="growing")
        await eventually(lambda: len(growing.tokens) >= 1)
        for i in range(12):
            await router.answer(prompt_of(5 * BLOCK + i, seed=i + 2), 2, request_id=str(i), source=source)
        await growing.done.wait()
        await worker.idle()


async def test_a_failing_step_ends_its_requests_with_an_error_and_the_worker_serves_on() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as router:
        got = await router.open(PROMPT, 100)
        await eventually(lambda: len(got.tokens) > 2)
        run, is_broken = worker.host.engine._runner.run, True

        def broken(batch):
            if is_broken and len(batch.tokens) != PROBE_TOKENS:
                raise RuntimeError("device lost")
            return run(batch)

        worker.host.engine._runner.run = broken
        await got.done.wait()
        is_broken = False
        assert got.last.error.kind == "StepFailed"
        assert "RuntimeError: device lost" in got.last.error.message
        await worker.idle()
        again = await router.answer(PROMPT, 5, request_id="again")
        assert again.tokens == expected_tokens(PROMPT, 5)


async def test_a_hundred_requests_that_come_and_go_leave_nothing_behind() -> None:
    slow = paced(prefill_tokens_per_s=20_000)
    async with prefill(model=slow) as source, decode(pages=60) as worker, router_to(worker) as router:
        prompts = [prompt_of(20 + 13 * (i % 12), seed=i % 7) for i in range(100)]

        async def ask(i: int) -> bool:
            got = await router.open(prompts[i], 3 + i % 9, request_id=str(i), source=source if i % 3 else None)
            if i % 4 == 0:
                await asyncio.sleep(0.002 * (i % 16))
                await router.close(str(i))
                return True
            async with asyncio.timeout(60):
                await got.done.wait()
            return got.tokens == expected_tokens(prompts[i], 3 + i % 9)

        assert all(await asyncio.gather(*map(ask, range(100))))
        await source.idle()


async def test_a_call_with_a_broken_message_harms_nobody() -> None:
    async with decode() as worker, router_to(worker) as router:
        call = router._peer.channel.unary_unary("/twostroke.v1.Decode/Open")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(b"\xff\xff\xff", metadata=router._peer.metadata)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(ServeError):
            await router.open([])
        assert (await router.answer(PROMPT, 2)).tokens == expected_tokens(PROMPT, 2)
