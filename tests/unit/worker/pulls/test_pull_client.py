"""Pulling pages from peers that are right, slow, damaged, dead or of another epoch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random

import pytest

from tests.trials.chaos.injection.fake_transport import Delay, Expire, Fail, Fault, FaultPlan, FlipByte, WriteLate
from tests.unit.worker.callers import Received, Router, router_to, with_epoch
from tests.unit.worker.pulls.peers import warm
from tests.unit.worker.rig import (
    BLOCK,
    PAGE_BYTES,
    Running,
    answers_of,
    claimed,
    decode,
    eventually,
    expected_tokens,
    paced,
    prefill,
    prompt_of,
)
from twostroke.base.errors import TransferFailed
from twostroke.base.ids import RequestId
from twostroke.config import PatienceConfig, RuntimeConfig, ScheduleConfig
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.rpc.v1 import worker_pb2

BLOCKS = 12
PROMPT = prompt_of(BLOCKS * BLOCK + 8)
SLOW = paced(prefill_tokens_per_s=400)
"""Prefill at 40 ms per block: long enough to do something meanwhile."""


async def right_answer(router: Router, source: Running | worker_pb2.PageSource, **options) -> Received:
    """Whatever happened on the way: no error, and the tokens that the right pages lead to."""
    got = await router.answer(PROMPT, 6, source=source, **options)
    assert not got.last.error.kind, got.last
    assert got.tokens == expected_tokens(PROMPT, 6)
    return got


def pulled_pages(decoder: Running) -> float:
    return decoder.metric("pull_bytes_total", transport="shm") / PAGE_BYTES


async def test_a_pull_brings_all_blocks_of_the_prompt_and_the_same_tokens() -> None:
    async with prefill() as source, decode() as target, router_to(target) as router:
        got = await right_answer(router, source)
        assert pulled_pages(target) == BLOCKS
        assert target.metric("computed_tokens_total") == len(PROMPT) - BLOCKS * BLOCK + 5
        assert got.last.cached_tokens == 0
        assert target.metric("pull_seconds_count", transport="shm") >= 1


async def test_tcp_is_used_where_it_is_the_only_transport() -> None:
    async with (
        prefill(runtime=RuntimeConfig(transports=("tcp",))) as source,
        decode() as target,
        router_to(target) as router,
    ):
        await right_answer(router, source)
        assert target.metric("pull_bytes_total", transport="tcp") == BLOCKS * PAGE_BYTES


async def test_where_the_best_transport_cannot_connect_the_next_one_is_taken() -> None:
    """This happens to cuda_ipc in two containers that see one GPU, and not each other's memory."""
    plan = FaultPlan(lost_connects=frozenset({0}))
    async with prefill() as source, decode(plan=plan) as target, router_to(target) as router:
        await right_answer(router, source)
        assert target.metric("pull_bytes_total", transport="tcp") == BLOCKS * PAGE_BYTES
        assert target.metric("transport_fallbacks_total", transport="shm") == 1


@pytest.mark.parametrize("left_s", [1e10, 1e300])
async def test_a_deadline_that_is_further_away_than_grpc_counts_stops_no_pull(left_s: float) -> None:
    async with prefill() as source, decode() as target, router_to(target) as router:
        await right_answer(router, source, deadline_s=time.time() + left_s)
        assert pulled_pages(target) == BLOCKS


async def test_a_burst_with_a_common_prefix_pulls_and_computes_each_block_once() -> None:
    prompts = [PROMPT[: 8 * BLOCK] + prompt_of(40, seed=i + 1) for i in range(6)]
    async with prefill() as source, decode() as target, router_to(target) as router:
        answers = [await router.open(prompt, 4, request_id=str(i), source=source) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == expected_tokens(prompt, 4)
        different = 8 + 6 * 2
        assert source.metric("served_pages_total") == pulled_pages(target) == different
        assert source.metric("computed_tokens_total") == different * BLOCK


async def test_only_missing_blocks_are_pulled() -> None:
    async with prefill() as source, decode() as target, router_to(target) as router:
        await router.answer(PROMPT[: 5 * BLOCK], 1, request_id="warm")
        got = await right_answer(router, source)
        assert pulled_pages(target) == BLOCKS - 5
        assert got.last.local_tokens == got.last.cached_tokens == 5 * BLOCK


async def test_blocks_that_the_source_had_count_as_cached_but_not_as_local() -> None:
    async with (
        prefill() as source,
        decode() as one,
        decode("decode-1") as two,
        router_to(one) as to_one,
        router_to(two) as to_two,
    ):
        await right_answer(to_one, source)
        got = await right_answer(to_two, source)
        assert got.last.cached_tokens == BLOCKS * BLOCK
        assert got.last.local_tokens == 0


async def test_a_pull_that_has_brought_all_is_reported_although_another_request_ends_before_its_task() -> None:
    async with prefill() as source, decode(model=paced(step_ms=5)) as target, router_to(target) as router:
        await warm(source, PROMPT)
        other = await router.open(prompt_of(40, seed=5), 500, request_id="other")
        await eventually(lambda: len(other.tokens) > 1)
        manager, pool, loop = answers_of(target), target.host.pool, asyncio.get_running_loop()

        class LastPage:
            def pages_changed(self, parts: Sequence[Part]) -> None:
                loop.call_soon(manager.close_request, RequestId("other"), 0)

        async def watch_last_page() -> None:
            while (state := manager._requests.get(RequestId("r"))) is None or not state.sequence.pages:
                await asyncio.sleep(0)
            page = state.sequence.pages[BLOCKS - 1]
            assert pool.is_arriving(page)
            pool.wait_for(page, LastPage(), Part(BLOCKS - 1, GroupKind.FULL))

        watching = asyncio.create_task(watch_last_page())
        got = await right_answer(router, source)
        await watching
        assert got.last.cached_tokens == BLOCKS * BLOCK


async def test_a_decode_worker_is_a_page_source_too() -> None:
    async with decode() as one, decode("decode-1") as two, router_to(one) as to_one, router_to(two) as to_two:
        await right_answer(to_one, None)
        got = await right_answer(to_two, one)
        assert pulled_pages(two) == BLOCKS
        assert got.last.cached_tokens == BLOCKS * BLOCK


async def test_a_decode_worker_that_has_only_some_blocks_serves_those_and_the_rest_is_computed() -> None:
    async with decode() as one, decode("decode-1") as two, router_to(one) as to_one, router_to(two) as to_two:
        await to_one.answer(PROMPT[: 4 * BLOCK], 1)
        await right_answer(to_two, one)
        assert pulled_pages(two) == 4
        assert two.metric("pull_failures_total", reason="transfer_failed") == 1


async def test_pages_travel_while_later_chunks_compute() -> None:
    schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=2 * BLOCK)
    async with (
        prefill(model=SLOW, schedule=schedule) as source,
        decode() as target,
        router_to(target) as router,
    ):
        answer = await router.open(PROMPT, 4, source=source)
        await eventually(lambda: pulled_pages(target) > 0)
        assert source.metric("computed_tokens_total") < BLOCKS * BLOCK, "the first page came after the last chunk"
        await answer.done.wait()
        assert target.metric("pull_seconds_count", transport="shm") == BLOCKS / 2
        instants = answer.last.lifetime
        assert instants["first_page"] < instants["last_page"] <= instants["first_token"]


@pytest.mark.parametrize(
    "fault",
    [Fail(), Expire(), FlipByte(copy=0, offset=3), WriteLate(), Delay(60.0)],
    ids=lambda fault: type(fault).__name__,
)
@pytest.mark.parametrize("transfer", [0, 3])
async def test_a_transfer_that_fails_ends_in_local_computation(fault: Fault, transfer: int) -> None:
    schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=2 * BLOCK)
    plan = FaultPlan({transfer: fault})
    slow = paced(prefill_tokens_per_s=1000)  # each step is announced alone
    async with (
        prefill(schedule=schedule, model=slow) as source,
        decode(plan=plan, pull_timeout_s=0.25) as target,
        router_to(target) as router,
    ):
        await right_answer(router, source)
        assert target.metric("pull_failures_total", reason="transfer_failed") == 1
        assert target.metric("digest_mismatches_total") == isinstance(fault, FlipByte)
        assert target.host.pool.count(PageState.QUARANTINED) == 0


async def test_connections_for_pages_that_are_lost_over_every_transport_end_in_local_computation() -> None:
    plan = FaultPlan(lost_connects=frozenset({0, 1}))
    async with prefill() as source, decode(plan=plan) as target, router_to(target) as router:
        await right_answer(router, source)
        assert target.metric("pull_failures_total", reason="peer_lost") == 1


async def test_a_source_that_is_not_there_ends_in_local_computation() -> None:
    async with decode() as target, router_to(target) as router:
        nobody = worker_pb2.PageSource(worker_id="prefill-9", address="127.0.0.1:9", epoch="1.1")
        await right_answer(router, nobody)
        assert target.metric("pull_failures_total", reason="peer_lost") == 1


async def test_a_source_that_shuts_down_during_the_pull_ends_in_local_computation() -> None:
    async with decode() as target, router_to(target) as router:
        schedule = ScheduleConfig(max_num_seqs=1, max_num_batched_tokens=16)
        async with prefill(model=paced(prefill_tokens_per_s=100), schedule=schedule) as source:
            answer = await router.open(PROMPT, 6, source=source)
            await eventually(lambda: pulled_pages(target) > 1)
            await source.worker.shutdown()
            await answer.done.wait()
        assert answer.tokens == expected_tokens(PROMPT, 6)
        assert sum(target.metric("pull_failures_total", reason=r) for r in ("peer_lost", "cancelled")) == 1


IMPATIENT = PatienceConfig(heartbeat_s=0.05, suspect_after_s=0.2, dead_after_s=0.4)


@pytest.mark.parametrize(("source_s", "failures"), [(0.05, 0), (60.0, 1)], ids=["slow", "silent"])
async def test_a_source_that_takes_long_is_waited_for_as_long_as_it_is_heard(source_s: float, failures: int) -> None:
    """All blocks come at once, after two and a half times the silence that is borne."""
    heard = PatienceConfig(heartbeat_s=source_s, suspect_after_s=2 * source_s, dead_after_s=4 * source_s)
    async with (
        prefill(model=paced(prefill_tokens_per_s=200), patience=heard) as source,
        decode(patience=IMPATIENT) as target,
        router_to(target) as router,
    ):
        await right_answer(router, source)
        assert target.metric("pull_failures_total", reason="peer_lost") == failures
        assert (pulled_pages(target) == 0) == bool(failures)


async def test_an_overloaded_source_ends_in_local_computation() -> None:
    schedule = ScheduleConfig(max_num_seqs=1, max_num_batched_tokens=64, max_waiting=1)
    async with prefill(schedule=schedule, model=SLOW) as source, decode() as target, router_to(target) as router:
        others = [prompt_of(10 * BLOCK, seed=i) for i in (5, 6)]
        for i, prompt in enumerate(others):
            await router.open(prompt, 2, request_id=str(i), source=source)
            await eventually(lambda i=i: source.worker._open_work() == i + 1)
            await eventually(lambda i=i: source.host.scheduler.waiting == i)
        await right_answer(router, source)
        assert target.metric("pull_failures_total", reason="overloaded") == 1
        for i in range(2):
            await router.close(str(i))


async def test_a_draining_source_ends_in_local_computation() -> None:
    async with prefill() as source, decode() as target, router_to(target) as router:
        assert await source.worker.drain(0) == 0
        await right_answer(router, source)
        assert target.metric("pull_failures_total", reason="draining") == 1


async def test_a_source_of_another_epoch_refuses_and_counts_and_the_pages_are_computed() -> None:
    async with prefill() as source, decode() as target, router_to(target) as router:
        await right_answer(router, with_epoch(source.source, "7.1"))
        assert target.metric("pull_failures_total", reason="stale_epoch") == 1
        assert source.metric("stale_epochs_total") == 1


async def test_an_earlier_life_does_not_displace_the_link_to_a_later_one() -> None:
    async with prefill() as source, decode() as target, router_to(target) as router:
        await right_answer(router, source)
        earlier = worker_pb2.PageSource(worker_id=source.info.worker_id, address="127.0.0.1:9", epoch="0.1")
        await router.answer(prompt_of(100, seed=3), 2, request_id="late", source=earlier)
        assert target.metric("pull_failures_total", reason="stale_epoch") == 1
        assert target.metric("stale_epochs_total") == 1
        served = source.metric("served_pages_total")
        await router.answer(prompt_of(100, seed=4), 2, request_id="again", source=source)
        assert source.metric("served_pages_total") == served + 6


async def test_an_epoch_that_is_none_ends_in_local_computation() -> None:
    async with prefill() as source, decode() as target, router_to(target) as router:
        await right_answer(router, with_epoch(source.source, "yesterday"))
        assert target.metric("pull_failures_total", reason="invalid_request") == 1


async def test_a_source_with_another_fingerprint_refuses_and_the_pages_are_computed() -> None:
    async with prefill(model=paced(), block_size=32) as source, decode() as target, router_to(target) as router:
        await right_answer(router, source)
        assert target.metric("pull_failures_total", reason="fingerprint_mismatch") == 1


async def test_a_bug_in_a_pull_costs_a_computation_and_not_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with prefill() as source, decode() as target, router_to(target) as router:

        async def broken(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(target.host.pulls, "_copy", broken)
        await right_answer(router, source)
        assert target.metric("pull_failures_total", reason="internal_error") == 1


async def test_closing_during_a_pull_frees_everything_on_both_sides() -> None:
    schedule = ScheduleConfig(max_num_seqs=1, max_num_batched_tokens=16)
    async with prefill(model=SLOW, schedule=schedule) as source, decode() as target, router_to(target) as router:
        await router.open(PROMPT, 6, source=source)
        await eventually(lambda: pulled_pages(target) > 1)
        await router.close()
        await target.idle()
        await source.idle()
        assert source.metric("computed_tokens_total") < BLOCKS * BLOCK, "computing went on for nobody"
        assert target.metric("pull_failures_total", reason="cancelled") == 0, "a pull that is stopped has not failed"


async def test_closing_one_of_two_sharers_leaves_the_other_its_pages() -> None:
    schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=16)
    async with prefill(model=SLOW, schedule=schedule) as source, decode() as target, router_to(target) as router:
        await router.open(PROMPT, 6, request_id="first", source=source)
        await eventually(lambda: pulled_pages(target) > 1)
        other = await router.open(PROMPT, 6, request_id="second", source=source)
        await eventually(lambda: target.host.scheduler.running == 2)
        await router.close("first")
        await other.done.wait()
        assert other.tokens == expected_tokens(PROMPT, 6)
        assert pulled_pages(target) == BLOCKS
        assert target.metric("computed_tokens_total") < BLOCK * 2


async def test_a_sharer_takes_over_when_the_pull_it_waits_for_fails() -> None:
    plan = FaultPlan(every_transfer=Expire())
    async with prefill() as source, decode(plan=plan, pull_timeout_s=0.2) as target, router_to(target) as router:
        answers = [await router.open(PROMPT, 6, request_id=name, source=source) for name in "abc"]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert [answer.tokens for answer in answers] == [expected_tokens(PROMPT, 6)] * 3
        assert target.metric("pull_failures_total", reason="transfer_failed") == 1
        computed_once = len(PROMPT) + 2 * 8 + 3 * 5
        assert target.metric("computed_tokens_total") == computed_once


async def test_a_pull_that_is_dropped_before_its_first_step_leaves_nothing() -> None:
    async with prefill() as source, decode() as target:
        pages, spec = claimed(target, source.source, PROMPT)
        async with asyncio.TaskGroup() as tasks:
            pull = target.host.pulls.start(spec, tasks)
            target.host.pool.release(pages)
            target.host.pulls.prune()
        assert pull.cancelled()
        await target.idle()


async def test_shutting_down_stops_pulls_whose_pages_are_still_wanted() -> None:
    async with prefill(model=paced(prefill_tokens_per_s=50)) as source:
        async with decode() as target:
            _, spec = claimed(target, source.source, PROMPT)
            pull = target.host.pulls.start(spec, answers_of(target)._supplies._tasks)
            await eventually(lambda: source.worker._open_work() == 1)
            await target.worker.shutdown()
            async with asyncio.timeout(60):
                await asyncio.wait({pull})
            assert pull.cancelled()
        await eventually(lambda: source.worker._open_work() == 0)


async def test_the_failure_is_in_the_report() -> None:
    async with prefill() as source, decode(plan=FaultPlan({0: Fail("link down")})) as target:
        pages, spec = claimed(target, source.source, PROMPT)
        async with asyncio.TaskGroup() as tasks:
            pull = target.host.pulls.start(spec, tasks)
        report = pull.result()
        assert isinstance(report.failure, TransferFailed)
        assert "link down" in report.failure.message
        assert report.pulled == report.copied_bytes == 0
        target.host.pool.release(pages)


@pytest.mark.parametrize("seed", range(3))
async def test_any_mixture_of_faults_ends_in_the_right_tokens_and_empty_books(seed: int) -> None:
    random = Random(seed)
    faults = [None, Fail(), Expire(), FlipByte(), WriteLate(), Delay(0.02), Delay(9.0)]
    chosen = {transfer: fault for transfer in range(200) if (fault := random.choice(faults)) is not None}
    plan = FaultPlan(chosen, lost_connects=frozenset(random.sample(range(40), 10)))
    slow = paced(prefill_tokens_per_s=20_000)
    async with (
        prefill(pages=40, model=slow) as source,
        decode(plan=plan, pages=40, pull_timeout_s=0.1) as target,
        router_to(target) as router,
    ):

        async def ask(number: int) -> None:
            prompt = prompt_of(random.randrange(1, 300), seed=random.randrange(5))
            await asyncio.sleep(random.random())
            got = await router.open(prompt, 8, request_id=str(number), source=source)
            if random.random() < 0.3:
                await asyncio.sleep(random.random() / 5)
                await router.close(str(number))
                return
            async with asyncio.timeout(60):
                await got.done.wait()
            assert got.tokens == expected_tokens(prompt, 8)

        await asyncio.gather(*map(ask, range(40)))
        assert plan.pulls > 10
        await source.idle()
