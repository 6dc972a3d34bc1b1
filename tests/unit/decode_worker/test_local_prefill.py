"""Prompts that would wait at their page source are computed by a decode worker that has room."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest

from decode_worker import local_prefill
from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import BLOCK, decode, eventually, expected_tokens, paced, prefill, prompt_of
from twostroke.config import ScheduleConfig
from twostroke.scheduler import local_prefill as choice
from twostroke.scheduler.lateness import WaitingPrompts
from twostroke.scheduler.local_prefill import ANSWER_S, PrefillSpeeds, choose
from twostroke.worker.steps.sharing import TimeSharing

SAME_PACE = PrefillSpeeds(chunk_blocks=32, source_s=0.01, local_s=0.01)


@dataclass(frozen=True)
class Waiting:
    number: int
    missing_blocks: int = 64
    source: str = "prefill-0"
    started_s: float = 0.0
    has_begun: bool = False
    is_computable: bool = True


def chosen(*pulls: Waiting, pace: PrefillSpeeds = SAME_PACE, now_s: float = 1.0) -> int | None:
    taken = choose(pulls, pace, now_s)
    return None if taken is None else taken.number


# The choice


def test_the_first_pull_of_a_source_is_its_own_and_the_oldest_behind_it_is_taken_over() -> None:
    assert chosen(Waiting(1)) is None
    assert chosen(Waiting(1), Waiting(2), Waiting(3)) == 2


def test_what_the_source_reaches_with_its_next_chunk_is_left_to_it() -> None:
    assert chosen(*(Waiting(number, 8) for number in range(1, 5))) is None
    assert chosen(*(Waiting(number, 8) for number in range(1, 7))) == 5
    assert chosen(Waiting(1, 8, has_begun=True), Waiting(2), Waiting(3)) == 3
    assert chosen(Waiting(1, 32, has_begun=True), Waiting(2, 32)) == 2


def test_each_source_has_a_queue_of_its_own() -> None:
    assert chosen(Waiting(1), Waiting(2, source="prefill-1")) is None
    assert chosen(Waiting(1), Waiting(2, source="prefill-1"), Waiting(3, source="prefill-1")) == 3


def test_a_pull_that_has_begun_or_is_young_or_cannot_be_computed_yet_stays() -> None:
    assert chosen(Waiting(1), Waiting(2, has_begun=True), Waiting(3)) == 3
    assert chosen(Waiting(1), Waiting(2, is_computable=False), Waiting(3)) == 3
    assert chosen(Waiting(1), Waiting(2, started_s=1.0 - ANSWER_S / 2)) is None


def test_a_slow_worker_takes_over_only_what_would_wait_longer_than_that() -> None:
    busy = replace(SAME_PACE, local_s=0.035)
    assert chosen(Waiting(1), Waiting(2), Waiting(3), pace=busy) is None
    assert chosen(*map(Waiting, range(1, 6)), pace=busy) == 4


def test_a_source_is_not_left_without_work_while_streams_are_slowed_down_here() -> None:
    slower = replace(SAME_PACE, local_s=0.015)
    assert chosen(Waiting(1), Waiting(2), pace=slower) is None
    assert chosen(Waiting(1), Waiting(2), Waiting(3), pace=slower) == 2
    assert chosen(Waiting(1), Waiting(2), Waiting(3, source="prefill-1"), pace=slower) is None


def test_while_nothing_is_known_of_costs_an_idle_worker_does_not_wait() -> None:
    assert chosen(Waiting(1), Waiting(2), pace=PrefillSpeeds(32, 0.0, 0.0)) == 2


# Workers

CHUNK = ScheduleConfig(max_num_seqs=32, max_num_batched_tokens=4 * BLOCK)
SLOW = paced(prefill_tokens_per_s=1000)


@pytest.mark.parametrize("local_prefill", [True, False])
async def test_a_burst_is_computed_on_both_sides_and_every_answer_is_right(local_prefill: bool) -> None:
    prompts = [prompt_of(8 * BLOCK + i, seed=i) for i in range(4)]
    schedule = CHUNK.replace(local_prefill=local_prefill)
    async with (
        prefill(model=SLOW, schedule=CHUNK) as source,
        decode(model=SLOW, schedule=schedule) as target,
        router_to(target) as router,
    ):
        answers = [await router.open(prompt, 6, request_id=str(i), source=source) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert [answer.tokens for answer in answers] == [expected_tokens(prompt, 6) for prompt in prompts]
        taken = target.metric("local_prefills_total")
        assert 1 <= taken <= 2 if local_prefill else taken == 0
        left = (4 - taken) * 8 * BLOCK
        under_way = taken * CHUNK.max_num_batched_tokens
        assert left <= source.metric("computed_tokens_total") <= left + under_way, "what is taken over is dropped there"
        assert {answer.last.cached_tokens for answer in answers} == {0}


async def test_a_pull_whose_pages_others_wait_for_stays_with_its_source() -> None:
    """Their own pulls build on those pages: the source computes them in any case."""
    common = prompt_of(8 * BLOCK, seed=1)
    prompts = [prompt_of(8 * BLOCK, seed=0), common + prompt_of(20, seed=2), common + prompt_of(20, seed=3)]
    async with (
        prefill(model=SLOW, schedule=CHUNK) as source,
        decode(model=SLOW, schedule=CHUNK) as target,
        router_to(target) as router,
    ):
        answers = [await router.open(prompt, 4, request_id=str(i), source=source) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert [answer.tokens for answer in answers] == [expected_tokens(prompt, 4) for prompt in prompts]
        assert target.metric("local_prefills_total") == 0
        assert source.metric("computed_tokens_total") == (8 + 8 + 1 + 1) * BLOCK


async def test_a_request_that_is_closed_while_it_is_taken_over_frees_everything() -> None:
    async with (
        prefill(model=SLOW, schedule=CHUNK) as source,
        decode(model=SLOW, schedule=CHUNK) as target,
        router_to(target) as router,
    ):
        for i in range(2):
            await router.open(prompt_of(8 * BLOCK + 1, seed=i), 4, request_id=str(i), source=source)
        await eventually(lambda: target.metric("local_prefills_total") == 1)
        for i in range(2):
            await router.close(str(i))
        await target.idle()
        await source.idle()


async def test_the_end_of_a_pull_lets_the_others_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[int] = []
    note_change = local_prefill.LocalPrefill.note_change

    def noted(local: local_prefill.LocalPrefill) -> None:
        changes.append(len(local._host.pulls.open_pulls()))
        note_change(local)

    monkeypatch.setattr(local_prefill.LocalPrefill, "note_change", noted)
    async with prefill() as source, decode() as target, router_to(target) as router:
        await router.answer(prompt_of(4 * BLOCK + 1), 1, source=source)
    assert changes == [1, 0, 0, 0], "its pull begins and ends, its first token comes, it ends"


async def test_a_source_that_dies_in_the_moment_of_a_takeover_costs_no_answer() -> None:
    prompts = [prompt_of(8 * BLOCK + i, seed=i) for i in range(4)]
    async with decode(model=SLOW, schedule=CHUNK) as target, router_to(target) as router:
        async with prefill(model=SLOW, schedule=CHUNK) as source:
            answers = [
                await router.open(prompt, 4, request_id=str(i), source=source) for i, prompt in enumerate(prompts)
            ]
            await eventually(lambda: target.metric("local_prefills_total") == 1)
            await source.worker.shutdown()
            await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert [answer.tokens for answer in answers] == [expected_tokens(prompt, 4) for prompt in prompts]


async def test_pages_that_are_taken_over_are_shared_by_those_who_come_later() -> None:
    prompts = [prompt_of(8 * BLOCK + 1, seed=i) for i in range(2)]
    async with (
        prefill(model=SLOW, schedule=CHUNK) as source,
        decode(model=SLOW, schedule=CHUNK) as target,
        router_to(target) as router,
    ):
        answers = [await router.open(prompt, 4, request_id=str(i), source=source) for i, prompt in enumerate(prompts)]
        await eventually(lambda: target.metric("local_prefills_total") == 1)
        sharer = await router.open(prompts[1], 4, request_id="sharer", source=source)
        await eventually(lambda: target.host.scheduler.running == 3)
        await router.close("1")
        await asyncio.gather(answers[0].done.wait(), sharer.done.wait())
        assert answers[0].tokens == expected_tokens(prompts[0], 4)
        assert sharer.tokens == expected_tokens(prompts[1], 4)
        begun = source.metric("computed_tokens_total") - 8 * BLOCK
        assert begun <= CHUNK.max_num_batched_tokens, "the sharer pulled what it could share"


async def test_pages_in_the_cache_of_the_source_are_pulled_however_many_requests_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (local_prefill, choice):  # a busy machine may keep a source that has all from saying so for long
        monkeypatch.setattr(module, "ANSWER_S", 5.0)
    prompts = [prompt_of(8 * BLOCK + 1, seed=i) for i in range(6)]
    async with (
        prefill() as source,
        decode() as other,
        decode("decode-1", model=SLOW, schedule=CHUNK) as target,
        router_to(other) as to_other,
        router_to(target) as router,
    ):
        for i, prompt in enumerate(prompts):
            await to_other.answer(prompt, 1, request_id=str(i), source=source)
        answers = [await router.open(prompt, 2, request_id=str(i), source=source) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert target.metric("local_prefills_total") == 0


async def test_streams_go_on_while_a_prompt_is_computed_beside_them() -> None:
    """The same tokens per step as alone, a few at a time from the prompt."""
    schedule = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=512, step_target_ms=30.0)
    model = paced(prefill_tokens_per_s=1000, step_ms=5)
    async with decode(model=model, schedule=schedule) as target, router_to(target) as router:
        prompt, long = prompt_of(3), prompt_of(400, seed=2)
        talker = await router.open(prompt, 60, request_id="talker")
        await eventually(lambda: len(talker.tokens) > 3)
        reader = await router.open(long, 4, request_id="reader")
        before = len(talker.tokens)
        await eventually(lambda: bool(reader.tokens))
        assert len(talker.tokens) - before >= 10, "one chunk of 400 tokens would have been a single step"
        await asyncio.gather(talker.done.wait(), reader.done.wait())
        assert talker.tokens == expected_tokens(prompt, 60)
        assert reader.tokens == expected_tokens(long, 4)


async def test_a_worker_whose_cores_compute_the_prompts_already_takes_none_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TimeSharing, "prompts_beside", property(lambda sharing: WaitingPrompts(1)))
    async with (
        prefill(model=SLOW, schedule=CHUNK) as source,
        decode(model=SLOW, schedule=CHUNK) as target,
        router_to(target) as router,
    ):
        answers = [
            await router.open(prompt_of(8 * BLOCK, seed=i), 4, request_id=str(i), source=source) for i in range(4)
        ]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert target.metric("local_prefills_total") == 0
