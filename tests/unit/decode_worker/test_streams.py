"""Token streams of a decode worker that break, are replaced, and are attached to again."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.worker.callers import Router, router_to
from tests.unit.worker.rig import decode, eventually, expected_tokens, paced, prompt_of
from twostroke.base.errors import (
    InvalidRequest,
    NotFound,
)
from twostroke.config import RuntimeConfig

PROMPT = prompt_of(100)
STEADY = paced(step_ms=10)
"""A token every 10 ms: time to do something between two of them."""


# Attach


async def test_attach_sends_again_from_a_position_without_gap_or_duplicate() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as router:
        got = await router.open(PROMPT, 40)
        await eventually(lambda: len(got.tokens) >= 8)
        await router.disconnect()
        kept = got.tokens[:5]
        got.tokens.clear()
        got.positions.clear()
        await eventually(lambda: worker.metric("sampled_tokens_total") >= 14)
        await router.connect()
        await eventually(lambda: worker.metric("sampled_tokens_total") >= 18)
        assert not got.tokens, "a parked request is silent"
        await router.attach(from_position=5)
        await got.done.wait()
        assert got.positions == list(range(5, 40))
        assert kept + got.tokens == expected_tokens(PROMPT, 40)


async def test_another_router_can_attach_and_the_first_hears_no_more() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as first, router_to(worker, "router-1") as second:
        got = await first.open(PROMPT, 30)
        await eventually(lambda: len(got.tokens) >= 3)
        await second.attach(from_position=2)
        moved = second.of("r")
        await moved.done.wait()
        assert moved.tokens == expected_tokens(PROMPT, 30)[2:]
        assert moved.positions == list(range(2, 30))
        assert len(got.tokens) < 30
        assert not worker.role._output_streams["router-0"]._sent, "the first router's stream still carries it"


async def test_the_end_can_be_fetched_after_it_was_missed_and_only_within_the_grace() -> None:
    async with decode(runtime=RuntimeConfig(orphan_grace_s=0.3)) as worker, router_to(worker) as router:
        got = await router.open(PROMPT, 5)
        await router.disconnect()
        await eventually(lambda: worker.is_idle)
        await router.connect()
        await router.attach(from_position=4)
        await got.done.wait()
        assert got.last.finish_reason == "length"
        assert got.last.position == 4
        await eventually(lambda: not worker.role._requests)
        with pytest.raises(NotFound):
            await router.attach(from_position=4)


@pytest.mark.parametrize("position", [2, 300])
async def test_attaching_to_a_position_that_is_not_here_is_refused(position: int) -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as router:
        got = await router.open(PROMPT, 15, emitted=[1, 2, 3])
        with pytest.raises(InvalidRequest, match=r"3 to \d+ can be attached to") as refusal:
            await router.attach(from_position=position)
        assert refusal.value.field == "from_position"
        await got.done.wait()


async def test_attaching_to_another_attempt_is_refused() -> None:
    async with decode() as worker, router_to(worker) as router:
        await router.answer(PROMPT, 2, attempt=1)
        with pytest.raises(NotFound, match="attempt 0"):
            await router.attach(attempt=0, from_position=0)


# Broken streams


async def test_requests_of_a_router_that_stays_away_are_dropped_after_the_grace() -> None:
    async with (
        decode(model=STEADY, runtime=RuntimeConfig(orphan_grace_s=0.3)) as worker,
        router_to(worker, "stays") as other,
    ):
        lost = await Router(worker.info, "lost").connect()
        await lost.open(PROMPT, 1000, request_id="orphan")
        kept = await other.open(PROMPT, 60, request_id="kept")
        await eventually(lambda: worker.host.scheduler.running == 2)
        await lost.aclose()
        await asyncio.sleep(0.1)
        assert worker.role.open_requests == 2, "parked, not dropped"
        await eventually(lambda: worker.role.open_requests == 1)
        await kept.done.wait()
        assert kept.tokens == expected_tokens(PROMPT, 60)
        assert "lost" not in worker.role._output_streams


async def test_a_router_that_opens_but_never_listens_is_dropped_after_the_grace() -> None:
    async with decode(model=STEADY, runtime=RuntimeConfig(orphan_grace_s=0.1)) as worker:
        deaf = Router(worker.info, "deaf")
        await deaf.open(PROMPT, 1000)
        await worker.idle()
        await deaf.aclose()


async def test_a_newer_stream_of_the_same_router_replaces_the_older() -> None:
    async with decode(model=STEADY) as worker, router_to(worker) as older:
        got = await older.open(PROMPT, 40)
        await eventually(lambda: len(got.tokens) >= 3)
        async with router_to(worker) as newer:
            await older.stream_ended.wait()
            await newer.attach(from_position=0)
            again = newer.of("r")
            await again.done.wait()
            assert again.tokens == expected_tokens(PROMPT, 40)
            assert len(got.tokens) < 40
