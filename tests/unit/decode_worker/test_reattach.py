"""Answers that another router goes on with: found, taken over, and safe from the one that had them."""

from __future__ import annotations

import time

import pytest

from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import answers_of, decode, eventually, expected_tokens, paced, prompt_of
from twostroke.base.errors import Cancelled, InvalidRequest, NotFound
from twostroke.base.ids import RequestId
from twostroke.config import RuntimeConfig

PROMPT = prompt_of(100)
STEADY = paced(step_ms=10)
NAME = "client~0123456789abcdef"


async def test_what_is_known_of_a_stream_is_found_whole_also_what_earlier_attempts_had_emitted() -> None:
    whole = expected_tokens(PROMPT, 30)
    async with decode(model=STEADY) as worker, router_to(worker) as router:
        for request_id in (f"{NAME}#0", f"{NAME}x#0", f"{NAME}/1#0", NAME):
            await router.open(PROMPT, 30, request_id=request_id, emitted=whole[:13], attempt=6)
        got = router.of(f"{NAME}#0", 6)
        await eventually(lambda: len(got.tokens) >= 3)
        (found,) = await router.find(NAME)
        known = [token.id for token in found.tokens]
        assert (found.request_id, found.attempt, tuple(found.request.prompt)) == (f"{NAME}#0", 6, PROMPT)
        assert known == whole[: len(known)]
        assert len(known) >= 16
        assert not found.finish_reason
        await got.done.wait()
        (ended,) = await router.find(NAME)
        assert ([token.id for token in ended.tokens], ended.finish_reason) == (whole, "length")
        assert await router.find("nobody") == []


async def test_whoever_had_an_answer_is_told_once_and_can_neither_close_it_nor_have_it_back() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as first, router_to(worker, "router-1") as second:
        left = await first.open(PROMPT, 40, attempt=3)
        await eventually(lambda: len(left.tokens) >= 3)
        await second.attach(attempt=3, from_position=2, new_attempt=9)
        await left.done.wait()
        assert left.last.finish_reason == "error"
        assert left.last.error.kind == "Cancelled"
        await first.close(attempt=3)
        with pytest.raises(Cancelled, match="router-1 continues"):
            await first.attach(attempt=3, from_position=4)
        with pytest.raises(InvalidRequest, match="open already, as attempt 9"):
            await first.open(PROMPT, 40, attempt=4)
        moved = second.of("r", 9)
        await moved.done.wait()
        assert moved.positions == list(range(2, 40))
        assert moved.tokens == expected_tokens(PROMPT, 40)[2:]
        assert len(left.entries) == len([entry for entry in left.entries if entry.tokens]) + 1


async def test_a_parked_answer_is_taken_over_and_no_longer_ends_with_the_grace_of_the_router_that_is_gone() -> None:
    async with (
        decode(model=STEADY, runtime=RuntimeConfig(orphan_grace_s=0.3)) as worker,
        router_to(worker, "router-1") as second,
    ):
        async with router_to(worker) as first:
            got = await first.open(PROMPT, 80, attempt=3, deadline_s=time.time() + 30)
            await eventually(lambda: len(got.tokens) >= 2)
        await second.attach(attempt=3, from_position=0, new_attempt=4)
        await second.of("r", 4).done.wait()
        assert second.of("r", 4).tokens == expected_tokens(PROMPT, 80)


async def test_a_later_attempt_of_another_router_is_told_to_the_one_that_had_the_answer() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as first, router_to(worker, "router-1") as second:
        left = await first.open(PROMPT, 60, attempt=3)
        await eventually(lambda: len(left.tokens) >= 2)
        assert (await second.answer(PROMPT, 4, attempt=4)).tokens == expected_tokens(PROMPT, 4)
        await left.done.wait()
        assert left.last.error.kind == "Cancelled"


async def test_taking_over_what_is_not_there_or_as_an_earlier_attempt_is_refused() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as router:
        await router.open(PROMPT, 20, attempt=3)
        with pytest.raises(NotFound):
            await router.attach(attempt=2, from_position=0, new_attempt=9)
        with pytest.raises(InvalidRequest, match="attempt 3 is not later than 3"):
            await router.attach(attempt=3, from_position=0, new_attempt=3)
        with pytest.raises(InvalidRequest, match="must be finite"):
            await router.attach(attempt=3, from_position=0, new_attempt=4, deadline_s=float("nan"))
        await router.of("r", 3).done.wait()


async def test_the_deadline_of_whoever_takes_over_counts() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as first, router_to(worker, "router-1") as second:
        await first.open(PROMPT, 500, attempt=1)
        await second.attach(attempt=1, from_position=0, new_attempt=2, deadline_s=time.time() + 0.1)
        taken = second.of("r", 2)
        await taken.done.wait()
        assert taken.last.error.kind == "DeadlineExceeded"


@pytest.mark.parametrize("deadline_s", [None, 60.0])
async def test_an_earlier_deadline_of_the_one_that_had_it_ends_nothing_any_more(deadline_s: float | None) -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as first, router_to(worker, "router-1") as second:
        ends_s = time.time() + 0.7
        await first.open(PROMPT, 100, attempt=1, deadline_s=ends_s)
        later_s = None if deadline_s is None else time.time() + deadline_s
        await second.attach(attempt=1, from_position=0, new_attempt=2, deadline_s=later_s)
        taken = second.of("r", 2)
        await taken.done.wait()
        assert taken.last.finish_reason == "length"
        assert time.time() > ends_s


@pytest.mark.parametrize("deadline_s", [None, 60.0])
async def test_an_answer_that_had_ended_is_forgotten_as_soon_whoever_takes_it_over(deadline_s: float | None) -> None:
    async with decode() as worker, router_to(worker) as first, router_to(worker, "router-1") as second:
        await first.answer(PROMPT, 4, attempt=1)
        ended = answers_of(worker)._requests[RequestId("r")]
        assert ended.timer is not None
        forgotten_at_s = ended.timer.when()
        later_s = None if deadline_s is None else time.time() + deadline_s
        await second.attach(attempt=1, from_position=0, new_attempt=2, deadline_s=later_s)
        taken = second.of("r", 2)
        await taken.done.wait()
        assert taken.tokens == expected_tokens(PROMPT, 4)
        assert (ended.timer.when(), ended.timer.cancelled()) == (forgotten_at_s, False)
