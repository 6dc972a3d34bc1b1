"""Logprobs of a prompt at a decode worker: with the first token, once, and the same whatever is in its cache."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.worker.callers import Received, Router, router_to
from tests.unit.worker.rig import VOCAB, answers_of, decode, expected_tokens, paced, prompt_of
from twostroke.base.errors import InvalidRequest
from twostroke.base.ids import RequestId
from twostroke.config import ModelConfig, ScheduleConfig
from twostroke.kv_cache.windows.window_group import window_group_of
from twostroke.request import PromptLogprobs
from twostroke.rpc.convert import prompt_logprobs_from_message
from twostroke.rpc.v1 import worker_pb2

PROMPT = prompt_of(300)


def asking(router: Router, count: int = 8, *, top: int = 2, **options: object) -> worker_pb2.OpenRequest:
    message = router.message(PROMPT, count, **options)
    message.request.sampling.prompt_logprobs = top
    return message


async def answered(router: Router, **options: object) -> Received:
    got = await router.send(asking(router, **options))
    async with asyncio.timeout(60):
        await got.done.wait()
    return got


def scores_of(got: Received) -> PromptLogprobs:
    """They come with the first token, and never again."""
    first, *others = [entry for entry in got.entries if entry.tokens]
    assert first.HasField("prompt_logprobs")
    assert not any(entry.HasField("prompt_logprobs") for entry in others)
    return prompt_logprobs_from_message(first.prompt_logprobs)


async def test_they_come_once_with_the_first_token() -> None:
    async with decode() as worker, router_to(worker) as router:
        got = await answered(router)
        scores = scores_of(got)
        assert len(scores) == len(PROMPT) - 1
        assert len(scores.top(0)) == 2
        assert got.tokens == expected_tokens(PROMPT, 8)


async def test_prefix_hits_change_nothing_and_none_is_counted_as_cached() -> None:
    async with decode() as worker, router_to(worker) as router:
        fresh = scores_of(await answered(router, request_id="first"))
        await router.answer(PROMPT, request_id="plain")
        again = await answered(router, request_id="again")
        assert scores_of(again) == fresh
        assert again.last.cached_tokens == 0
        later = await router.answer(PROMPT, request_id="later")
        assert later.last.cached_tokens >= 288, "its pages are shared once they are computed"


async def test_preemption_changes_nothing() -> None:
    async with decode(pages=128) as worker, router_to(worker) as router:
        expected = scores_of(await answered(router))
    tight = ScheduleConfig(max_num_batched_tokens=16, max_num_seqs=4)
    async with decode(pages=36, model=paced(step_ms=1), schedule=tight) as worker, router_to(worker) as router:
        streams = [await router.open(prompt_of(100, seed=i), 250, request_id=f"stream-{i}") for i in range(1, 3)]
        got = await router.send(asking(router))
        async with asyncio.timeout(30):
            await asyncio.gather(*(each.done.wait() for each in [*streams, got]))
        assert answers_of(worker)._requests[RequestId("r")].sequence.preemptions
        assert scores_of(got) == expected
        assert got.tokens == expected_tokens(PROMPT, 8)


async def test_an_attempt_that_goes_on_after_tokens_sends_none() -> None:
    async with decode() as worker, router_to(worker) as router:
        got = await answered(router, emitted=expected_tokens(PROMPT, 3))
        assert not any(entry.HasField("prompt_logprobs") for entry in got.entries)
        assert got.tokens == expected_tokens(PROMPT, 8)[3:]


async def test_they_come_again_to_a_router_that_attaches_from_the_beginning() -> None:
    async with decode() as worker, router_to(worker) as router, router_to(worker, "other") as other:
        got = await answered(router)
        await other.attach("r", 0, from_position=0, new_attempt=1)
        taken = other.of("r", 1)
        async with asyncio.timeout(60):
            await taken.done.wait()
        assert scores_of(taken) == scores_of(got)


async def test_a_snapshot_has_them() -> None:
    async with decode() as worker, router_to(worker) as router:
        got = await answered(router, request_id="r#0")
        (found,) = await router.find("r")
        assert prompt_logprobs_from_message(found.prompt_logprobs) == scores_of(got)


async def test_too_many_are_refused_by_name() -> None:
    async with decode() as worker, router_to(worker) as router:
        with pytest.raises(InvalidRequest, match="prompt_logprobs must be from 0 to 20"):
            await router.send(asking(router, top=21))


async def test_where_window_parts_lie_apart_a_scored_prompt_holds_few_of_them_and_counts_nothing_as_cached() -> None:
    model = ModelConfig(model=f"paced:window=32,vocab={VOCAB},max_model_len=4096,step_ms=1")
    schedule = ScheduleConfig(max_num_batched_tokens=32, max_num_seqs=16)
    async with decode(model=model, schedule=schedule) as worker, router_to(worker) as router:
        await router.answer(PROMPT, request_id="plain")
        fresh = await answered(router, request_id="first")
        again = await asyncio.gather(*(answered(router, request_id=f"again-{number}") for number in range(6)))
        assert len(scores_of(fresh)) == len(PROMPT) - 1
        assert [scores_of(each) for each in again] == [scores_of(fresh)] * 6
        assert [each.last.cached_tokens for each in again] == [0] * 6
        await worker.idle()
        windows = window_group_of(worker.host.pool)
        assert windows is not None
        assert windows.committed == 0
