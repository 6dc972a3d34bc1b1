"""Pages that a transfer may still write to are nobody else's until its fence stands."""

from __future__ import annotations

import asyncio

import pytest

from tests.trials.chaos.injection.fake_transport import FaultPlan, WriteLate
from tests.unit.worker.rig import BLOCK, Running, claimed, decode, eventually, prefill, prompt_of
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.transfer.base import Transfer

BLOCKS = 12
PROMPT = prompt_of(BLOCKS * BLOCK + 8)


def held_fence(running: Running, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Set when a fence has begun, and to be set so that it may stand."""
    transport = running.host.transports[0]
    fencing, may_fence = asyncio.Event(), asyncio.Event()
    fence = transport.fence

    async def slow_fence(transfer: Transfer) -> None:
        fencing.set()
        await may_fence.wait()
        await fence(transfer)

    monkeypatch.setattr(transport, "fence", slow_fence)
    return fencing, may_fence


async def test_pages_stay_quarantined_until_the_fence_stands_however_often_the_pull_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with prefill() as source, decode(plan=FaultPlan(every_transfer=WriteLate())) as target:
        fencing, may_fence = held_fence(target, monkeypatch)
        pool, pulls = target.host.pool, target.host.pulls
        pages, spec = claimed(target, source.source, PROMPT)
        async with asyncio.TaskGroup() as tasks:
            pull = pulls.start(spec, tasks)
            await eventually(lambda: target.plan.pulls == 1)
            pool.release(pages)
            pulls.prune()
            await fencing.wait()
            for _ in range(3):
                pulls.prune()
                pull.cancel()
                await asyncio.sleep(0.01)
                assert pool.count(PageState.QUARANTINED) == BLOCKS, "pages were freed while they are written to"
            may_fence.set()
        await target.idle()


async def test_pages_of_a_pull_that_is_left_can_be_given_back_and_claimed_anew_before_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This happens when a sequence is preempted while its prompt is computed locally."""
    async with prefill() as source, decode(plan=FaultPlan({0: WriteLate()})) as target:
        fencing, may_fence = held_fence(target, monkeypatch)
        pool, pulls = target.host.pool, target.host.pulls
        pages, spec = claimed(target, source.source, PROMPT)
        async with asyncio.TaskGroup() as tasks:
            left = pulls.start(spec, tasks)
            await eventually(lambda: target.plan.pulls == 1)
            pulls.stop_one(spec.session)
            await fencing.wait()
            pool.release(pages)
            pulls.prune()
            assert pool.count(PageState.QUARANTINED) == BLOCKS
            again, spec = claimed(target, source.source, PROMPT)
            assert not set(again) & set(pages)
            pulled = pulls.start(spec, tasks)
            assert (await pulled).pulled == BLOCKS
            assert pool.count(PageState.QUARANTINED) == BLOCKS, "the one that was left may still write"
            may_fence.set()
        assert left.cancelled()
        assert pool.count(PageState.QUARANTINED) == 0
        pool.release(again)
        await target.idle()
