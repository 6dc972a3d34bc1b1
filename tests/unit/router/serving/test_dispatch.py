"""Dispatch against real gRPC workers: order, choices, refusals, cancelling, deadlines, draining."""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import time
from dataclasses import replace

import pytest

from router.fleet.token_stream import TokenDelta
from router.serving.choice_state import ChoiceState
from router.serving.parent_request import ParentRequest
from twostroke.base.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    PeerLost,
)
from twostroke.kv_cache.block import block_hashes_of
from twostroke.request import GenerateRequest, SamplingParams
from twostroke.rpc.v1 import worker_pb2


async def test_an_answer_comes_in_order_and_is_not_closed_at_the_worker(fleet, ask):
    worker = await fleet.add("decode-0")
    answer = await ask(await fleet.core()).task
    assert answer.is_right
    assert answer.finishes[0].finish == "length"
    assert worker.closed == []
    assert list(worker.opens[0].request.prompt) == list(range(100))
    assert worker.opens[0].request_id == "r#0"
    assert worker.opens[0].block_hashes == b"".join(block_hashes_of(range(100), 16))


async def test_a_choice_has_two_lines_in_the_log(fleet, ask, caplog):
    await fleet.add("decode-0")
    core = await fleet.core()
    caplog.set_level(logging.INFO)
    await ask(core).task
    placed, ended = (each.getMessage() for each in caplog.records if "request=r#0" in each.getMessage())
    assert placed.startswith("routed request=r#0 attempt=")
    assert ended.startswith("choice ended request=r#0 outcome=length worker=decode-0 prompt_tokens=100 tokens=")
    assert " attempts=1 " in ended
    assert " done=" in ended


async def test_choices_come_each_with_its_own_tokens_and_finish(fleet, ask):
    await fleet.add("decode-0")
    answer = await ask(await fleet.core(), n=3).task
    assert answer.is_right
    assert set(answer.finishes) == {0, 1, 2}
    assert len({tuple(tokens) for tokens in answer.tokens.values()}) == 3


async def test_a_prompt_seen_before_is_reused_and_goes_to_the_same_worker(fleet, ask, soon, sampled):
    for number in range(3):
        await fleet.add(f"decode-{number}")
    core = await fleet.core()
    await ask(core).task
    await soon(lambda: sampled(core, "index_blocks") > 0)
    second = await ask(core).task
    assert second.finishes[0].cached_tokens == 6 * 16
    used = [worker for worker in fleet.workers.values() if worker.opens]
    assert len(used) == 1
    assert sampled(core, "predicted_reused_blocks_total") == 6
    assert sampled(core, "reused_blocks_total") == 6


async def test_cold_prompts_with_one_cache_key_meet_at_a_worker(fleet, ask):
    for number in range(3):
        await fleet.add(f"decode-{number}")
    core = await fleet.core()
    for number in range(8):
        await ask(core, request_id=f"r{number}", prompt=range(100 * number, 100 * number + 50), cache_key=b"k").task
    assert [len(worker.opens) for worker in fleet.workers.values() if worker.opens] == [8]


async def test_a_burst_of_siblings_goes_where_their_prefix_is_being_computed(fleet, ask):
    for number in range(3):
        await fleet.add(f"prefill-{number}", "prefill")
    worker = await fleet.add("decode-0", hold_at=0)
    core = await fleet.core()
    asks = [ask(core, request_id=f"r{number}", prompt=[*range(800), number // 2]) for number in range(8)]
    try:
        async with asyncio.timeout(60):
            while len(worker.opens) < 8:
                await asyncio.sleep(0.01)
    finally:
        worker.hold_at = None
    assert len({opened.source.worker_id for opened in worker.opens}) == 1
    assert worker.opens[0].source.worker_id.startswith("prefill-")
    for each in asks:
        assert (await each.task).is_right


async def test_before_any_decode_worker_is_known_there_are_no_facts(fleet, ask):
    core = await fleet.core(ready=False)
    assert not core.is_ready
    with pytest.raises(PeerLost):
        _ = core.facts
    with pytest.raises(PeerLost):
        await ask(core).task
    await fleet.add("decode-0")
    while not core.is_ready:
        await asyncio.sleep(0.01)
    assert core.is_ready
    assert core.facts.pool_tokens == 500 * 16


async def test_a_client_that_leaves_mid_stream_closes_the_answer_at_the_worker(fleet, ask, soon):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core, n=2)
    await answer.has(5, 0)
    await answer.has(5, 1)
    answer.task.cancel()
    await soon(lambda: sorted(worker.closed) == [("r#0", 0), ("r#1", 1)])
    assert worker.answers == {}
    assert len(core._routing.reservations) == 0


async def test_a_client_that_leaves_before_the_first_token_closes_the_answer(fleet, ask, soon):
    worker = await fleet.add("decode-0", hold_at=0)
    core = await fleet.core()
    answer = ask(core)
    await soon(lambda: ("r#0", 0) in worker.answers)
    answer.task.cancel()
    await soon(lambda: worker.closed == [("r#0", 0)])


async def test_a_client_that_leaves_while_its_request_is_being_opened_closes_it(fleet, ask, soon):
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    worker.may_open.clear()
    answer = ask(core)
    await soon(lambda: len(worker.opens) == 1)
    answer.task.cancel()
    await soon(lambda: worker.closed == [("r#0", 0)])
    worker.may_open.set()


async def test_a_client_that_leaves_while_nobody_serves_leaves_nothing(fleet, ask, soon, statuses):
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    await worker.kill()
    await soon(lambda: statuses(core) == {"decode-0": "suspect"})
    answer = ask(core)
    await soon(lambda: "r" in core._open)
    answer.task.cancel()
    await soon(lambda: not core._open)
    assert len(core._routing.reservations) == 0


async def test_a_request_that_no_message_can_carry_leaves_nothing(fleet):
    await fleet.add("decode-0")
    core = await fleet.core()
    params = SamplingParams(seed=1, max_tokens=2, top_k=2**40)
    with pytest.raises(InternalError, match="out of range"):
        await anext(core.generate(request_of(params)))
    assert not core._open
    assert len(core._routing.reservations) == 0


async def test_a_worker_that_could_not_be_told_of_it_is_told_again_while_its_stream_lives(
    fleet, ask, soon, monkeypatch
):
    monkeypatch.setattr("router.fleet.link_pool.RETRY_PAUSE_S", 0.01)
    worker = await fleet.add("decode-0", hold_at=5, misses_closes=2)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)
    answer.task.cancel()
    await soon(lambda: worker.closed == [("r#0", 0)])
    assert not core._with.links._unclosed


async def test_a_worker_that_refuses_to_be_told_is_told_once(fleet, ask, soon, monkeypatch):
    monkeypatch.setattr("router.fleet.link_pool.RETRY_PAUSE_S", 0.01)
    worker = await fleet.add("decode-0", hold_at=5, refused_closes=0)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)
    answer.task.cancel()
    await soon(lambda: worker.refused_closes > 0)
    await soon(lambda: not core._with.links._closing)
    assert worker.refused_closes == 1
    assert not core._with.links._unclosed


async def test_a_router_that_closes_waits_for_no_worker_that_cannot_be_told(fleet, ask):
    await fleet.add("decode-0", hold_at=5, misses_closes=10**6)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)
    async with asyncio.timeout(60):
        await core.close()
    with pytest.raises(Draining):
        await answer.task


async def test_a_deadline_that_passes_mid_stream_ends_the_request_and_closes_it(fleet, ask, soon):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core, deadline_s=time.time() + 0.5)
    with pytest.raises(DeadlineExceeded, match="after 5 tokens"):
        await answer.task
    await soon(lambda: worker.closed == [("r#0", 0)])
    assert worker.opens[0].request.deadline_s == pytest.approx(answer.request.deadline_s)


async def test_a_deadline_that_has_passed_reaches_no_worker(fleet, ask):
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    with pytest.raises(DeadlineExceeded):
        await ask(core, deadline_s=time.time() - 1).task
    assert worker.opens == []


async def test_a_full_worker_is_passed_over(fleet, ask):
    full = await fleet.add("decode-0", refusal=Overloaded("queue is full"))
    free = await fleet.add("decode-1")
    core = await fleet.core()
    answers = [ask(core, request_id=f"r{number}", prompt=range(number, 60)) for number in range(12)]
    for answer in answers:
        assert (await answer.task).is_right
    assert full.opens
    assert len(free.opens) == 12
    assert full.closed == []


async def test_when_all_workers_are_full_the_client_hears_overloaded_at_once(fleet, ask):
    for number in range(2):
        await fleet.add(f"decode-{number}", refusal=Overloaded("queue is full"))
    core = await fleet.core()
    with pytest.raises(Overloaded, match="all 2 decode workers"):
        await ask(core).task


async def test_what_a_worker_says_about_the_request_itself_reaches_the_client(fleet, ask, caplog):
    worker = await fleet.add("decode-0", refusal=InvalidRequest("too long by 3 tokens", field="prompt"))
    core = await fleet.core()
    with pytest.raises(InvalidRequest, match="too long by 3") as raised:
        await ask(core).task
    assert raised.value.field == "prompt"
    assert len(worker.opens) == 1
    assert "open refused request=" in caplog.text
    assert "too long by 3" not in caplog.text, "it may quote what the client sent"


async def test_an_error_entry_is_an_error_and_never_a_plain_end(fleet, ask):
    await fleet.add("decode-0", fail_answers=InternalError("sampler broke"))
    core = await fleet.core()
    answer = ask(core)
    with pytest.raises(InternalError, match="sampler broke"):
        await answer.task
    assert answer.finishes == {}


async def test_a_failing_choice_takes_its_siblings_along_and_no_other_request(fleet, ask, soon):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    other = ask(core, request_id="other")
    await other.has(5)
    answer = ask(core, n=2, prompt=range(7))
    await answer.has(5, 0)
    await answer.has(5, 1)
    entry = worker_pb2.TokenEntry(
        request_id="r#0",
        attempt=1,
        finish_reason="error",
        error=worker_pb2.ErrorInfo(kind="InternalError", message="broke"),
    )
    worker.streams[core.router_id].put_nowait(worker_pb2.TokenBatch(entries=[entry]))
    with pytest.raises(InternalError):
        await answer.task
    await soon(lambda: worker.closed == [("r#1", 2)])
    worker.hold_at = None
    assert (await other.task).is_right


async def test_two_open_requests_may_not_share_an_id(fleet, ask):
    worker = await fleet.add("decode-0", hold_at=1)
    core = await fleet.core()
    first = ask(core)
    await first.has(1)
    with pytest.raises(InvalidRequest) as raised:
        await ask(core).task
    assert raised.value.field == "request_id"
    worker.hold_at = None
    assert (await first.task).is_right
    assert (await ask(core).task).is_right


async def test_a_choice_finished_early_ends_as_stop_and_is_closed(fleet, ask, soon):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core, n=2)
    await answer.has(5, 0)
    await answer.has(5, 1)
    core.finish_early(answer.parent, 0)
    core.finish_early(answer.parent, 0)
    core.finish_early(replace(answer.parent, request_id="nobody"), 0)
    await soon(lambda: 0 in answer.finishes)
    assert answer.finishes[0].finish == "stop"
    await soon(lambda: worker.closed == [("r#0", 0)])
    worker.hold_at = None
    await answer.task
    assert len(answer.tokens[0]) == 5
    assert len(answer.tokens[1]) == 20
    assert [ended.output_tokens for ended in core._demand.ended] == [5, 20], (
        "a stop string ends an answer like any other"
    )


async def test_tokens_that_are_taken_at_once_are_not_yielded(fleet):
    await fleet.add("decode-0")
    core, taken = await fleet.core(), list[TokenDelta]()

    def take(choice: int, delta: TokenDelta) -> bool:
        taken.append(delta)
        return True

    (end,) = [delta async for _, delta in core.generate(request_of(SamplingParams(seed=1, max_tokens=20)), take)]
    assert end.finish == "length"
    assert end.tokens == ()
    assert [delta.position for delta in taken] == list(range(20))


async def test_a_stop_string_ends_a_choice_while_its_token_is_taken(fleet, soon):
    worker = await fleet.add("decode-0")
    core, request, taken = await fleet.core(), request_of(SamplingParams(seed=1, max_tokens=20)), list[TokenDelta]()

    def take(choice: int, delta: TokenDelta) -> bool:
        taken.append(delta)
        if len(taken) == 3:
            core.finish_early(request, choice)
        return True

    (end,) = [delta async for _, delta in core.generate(request, take)]
    assert (end.finish, end.position, len(taken)) == ("stop", 3, 3)
    await soon(lambda: worker.closed == [("r#0", 0)])


async def test_a_failure_to_take_a_token_ends_that_request_alone(fleet, ask):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    other = ask(core, request_id="other")
    await other.has(5)

    def fail(choice: int, delta: TokenDelta) -> bool:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        await anext(core.generate(request_of(SamplingParams(seed=1, max_tokens=20)), fail))
    worker.hold_at = None
    assert (await other.task).is_right


def request_of(sampling: SamplingParams) -> ParentRequest:
    return ParentRequest(request_id="r", request=GenerateRequest(prompt=(1, 2, 3), sampling=sampling))


async def test_an_aborted_request_ends_as_cancelled(fleet, ask, soon):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)
    assert await core.abort("r")
    with pytest.raises(Cancelled):
        await answer.task
    await soon(lambda: worker.closed == [("r#0", 0)])
    assert not await core.abort("r")


async def test_a_draining_router_finishes_what_is_open_and_takes_nothing_new(fleet, ask, soon):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)
    assert await core.drain(time.time() + 0.05) == 1
    assert core.is_draining
    assert not core.is_ready
    with pytest.raises(Draining):
        await ask(core, request_id="new").task
    draining = asyncio.create_task(core.drain(time.time() + 10))
    worker.hold_at = None
    assert (await answer.task).is_right
    assert await draining == 0


async def test_a_router_that_closes_tells_clients_and_workers(fleet, ask, soon):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)
    await core.close()
    with pytest.raises(Draining):
        await answer.task
    assert worker.closed == [("r#0", 0)]


async def test_a_frozen_answer_does_not_hold_up_others(fleet, ask):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    stuck = ask(core)
    await stuck.has(5)
    short = await ask(core, tokens=4, request_id="short", prompt=range(9)).task
    assert short.is_right
    worker.hold_at = None
    await stuck.task


async def test_a_wrong_cluster_token_is_said_plainly(fleet, caplog):
    from router.metrics import RouterMetrics
    from router.serving.dispatcher import RouterCore
    from twostroke.config import RouterConfig

    core = RouterCore(RouterConfig(fleet_address=fleet.address, cluster_token="wrong"), RouterMetrics())
    await core.start()
    try:
        async with asyncio.timeout(60):
            while "token" not in caplog.text:
                await asyncio.sleep(0.01)
        assert "the caller does not have this cluster's token" in caplog.text
    finally:
        await core.close()


async def test_choices_begin_one_in_a_turn_of_the_loop(fleet, ask, monkeypatch):
    """To place a hundred of them at once would hold everybody's streams."""
    await fleet.add("decode-0")
    core, begun, turn, run = await fleet.core(), [], itertools.count(), ChoiceState.run
    now = next(turn)

    def count() -> None:
        nonlocal now
        now = next(turn)
        counting.append(asyncio.get_running_loop().call_soon(count))

    async def noted(state: ChoiceState) -> None:
        begun.append(now)
        await run(state)

    monkeypatch.setattr(ChoiceState, "run", noted)
    counting = collections.deque[asyncio.Handle](maxlen=1)
    count()
    answer = await ask(core, n=50).task
    counting[0].cancel()
    assert answer.is_right
    assert len(begun) == 50
    assert max(collections.Counter(begun).values()) <= 2
