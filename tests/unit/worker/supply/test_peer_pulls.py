"""Prefixes that a peer holds: fetched by whoever computes, while its queue drains."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.ready_pages import pages_in
from tests.trials.chaos.injection.fake_transport import Delay, FaultPlan
from tests.unit.worker.callers import Puller, router_to
from tests.unit.worker.pulls.peers import (
    BLOCKS,
    BY_BLOCK,
    HELD,
    PROMPT,
    SLOW,
    computed,
    failures,
    fetched,
    held_by,
    right_answer,
    warm,
)
from tests.unit.worker.rig import BLOCK, PAGE_BYTES, decode, eventually, expected_tokens, prefill, prompt_of
from twostroke.base.errors import TransferFailed
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.worker.supply import remote

# The source fetches


async def test_a_source_fetches_what_its_peer_holds_and_computes_the_rest() -> None:
    async with (
        prefill("holder") as peer,
        prefill("source") as source,
        decode() as target,
        router_to(target) as router,
    ):
        await warm(peer, PROMPT[: HELD * BLOCK])
        got = await right_answer(router, source=source, peer=held_by(peer))
        assert computed(source) == (BLOCKS - HELD) * BLOCK
        assert fetched(source) == HELD
        assert source.metric("peer_pulled_bytes_total") == HELD * PAGE_BYTES
        assert got.last.cached_tokens == HELD * BLOCK, "what was fetched counts as reused, not as computed"
        assert got.last.local_tokens == 0
        assert target.metric("pull_bytes_total", transport="shm") == BLOCKS * PAGE_BYTES


async def test_a_source_fetches_only_what_it_lacks() -> None:
    async with (
        prefill("holder") as peer,
        prefill("source") as source,
        decode() as target,
        router_to(target) as router,
    ):
        await warm(peer, PROMPT[: HELD * BLOCK])
        await warm(source, PROMPT[: 4 * BLOCK])
        await right_answer(router, source=source, peer=held_by(peer))
        assert fetched(source) == HELD - 4
        assert computed(source) == (4 + BLOCKS - HELD) * BLOCK


async def test_a_source_fetches_from_the_very_worker_that_asks_it() -> None:
    """A decode worker holds a conversation so far; its source needs that for the next turn, and sends the rest."""
    async with prefill() as source, decode() as target, router_to(target) as router:
        await router.answer(PROMPT[: HELD * BLOCK], 1, request_id="turn 1")
        got = await right_answer(router, source=source, peer=held_by(target))
        assert fetched(source) == HELD
        assert computed(source) == (BLOCKS - HELD) * BLOCK
        assert target.metric("pull_bytes_total", transport="shm") == (BLOCKS - HELD) * PAGE_BYTES
        assert got.last.local_tokens == HELD * BLOCK


async def test_what_a_peer_sent_is_announced_before_the_rest_is_computed() -> None:
    async with (
        prefill("holder") as peer,
        prefill("source", model=SLOW, schedule=BY_BLOCK) as source,
        contextlib.aclosing(Puller(source.info)) as puller,
    ):
        await warm(peer, PROMPT[: HELD * BLOCK])
        call = puller.pull(PROMPT[: BLOCKS * BLOCK], peer=peer.source, peer_blocks=HELD)
        first = await puller.pages(call, HELD)
        assert [page.block for page in pages_in(first)] == list(range(HELD))
        assert sum(message.computed for message in first) == 0
        assert computed(source) <= BLOCK
        rest = await puller.pages(call, BLOCKS - HELD)
        assert sum(message.computed for message in rest) == BLOCKS - HELD
        call.cancel()


async def test_a_prefix_is_fetched_while_the_source_computes_for_others() -> None:
    other = prompt_of(12 * BLOCK, seed=5)
    async with (
        prefill("holder") as peer,
        prefill("source", model=SLOW, schedule=BY_BLOCK) as source,
        decode() as target,
        router_to(target) as router,
    ):
        await warm(peer, PROMPT[: HELD * BLOCK])
        before = await router.open(other, 2, request_id="before", source=source)
        await eventually(lambda: computed(source) > 0)
        got = await router.open(PROMPT, 6, source=source, peer=held_by(peer))
        await eventually(lambda: fetched(source) == HELD)
        assert computed(source) < len(other), "the queue had drained before anything was fetched"
        await asyncio.gather(before.done.wait(), got.done.wait())
        assert got.tokens == expected_tokens(PROMPT, 6)
        assert computed(source) == len(other) + (BLOCKS - HELD) * BLOCK


async def test_who_waits_for_a_peer_holds_up_nobody_else() -> None:
    other = prompt_of(6 * BLOCK, seed=5)
    async with (
        prefill("holder") as peer,
        prefill("source", schedule=BY_BLOCK, plan=FaultPlan(every_transfer=Delay(0.4))) as source,
        decode() as target,
        router_to(target) as router,
    ):
        await warm(peer, PROMPT[: HELD * BLOCK])
        waiting = await router.open(PROMPT, 6, source=source, peer=held_by(peer))
        await eventually(lambda: source.plan.pulls == 1)
        await router.answer(other, 2, request_id="other", source=source)
        assert computed(source) == len(other), "only the other one's blocks were computed meanwhile"
        assert not waiting.tokens
        await waiting.done.wait()
        assert waiting.tokens == expected_tokens(PROMPT, 6)
        assert fetched(source) == HELD


async def test_a_source_that_nobody_asks_any_more_stops_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 10.0)
    async with (
        prefill("holder") as peer,
        prefill("source", plan=FaultPlan(every_transfer=Delay(60.0))) as source,
        contextlib.aclosing(Puller(source.info)) as puller,
    ):
        await warm(peer, PROMPT[: HELD * BLOCK])
        call = puller.pull(PROMPT[: HELD * BLOCK], peer=peer.source, peer_blocks=HELD)
        await eventually(lambda: source.plan.pulls == 1)
        call.cancel()
        await source.idle()
        await peer.idle()
        assert failures(source, "transfer_failed") == 0, "it ended by its own limit alone"


async def test_pulls_with_a_common_prefix_fetch_it_once() -> None:
    prompts = [PROMPT[: HELD * BLOCK] + prompt_of(40, seed=i + 1) for i in range(4)]
    async with (
        prefill("holder") as peer,
        prefill("source") as source,
        decode() as target,
        decode("decode-1") as second,
        router_to(target) as router,
        router_to(second) as to_second,
    ):
        await warm(peer, PROMPT[: HELD * BLOCK])
        routers = [router, to_second, router, to_second]
        answers = [
            await to.open(prompt, 4, request_id=str(i), source=source, peer=held_by(peer))
            for i, (to, prompt) in enumerate(zip(routers, prompts, strict=True))
        ]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert [answer.tokens for answer in answers] == [expected_tokens(prompt, 4) for prompt in prompts]
        assert fetched(source) == HELD
        assert computed(source) == 4 * 2 * BLOCK


# The decode worker fetches


async def test_a_decode_worker_that_computes_itself_fetches_what_its_peer_holds() -> None:
    async with prefill() as peer, decode() as target, router_to(target) as router:
        await warm(peer, PROMPT[: HELD * BLOCK])
        got = await right_answer(router, peer=held_by(peer))
        assert fetched(target) == HELD
        assert computed(target) == len(PROMPT) - HELD * BLOCK + 5
        assert computed(peer) == HELD * BLOCK
        assert got.last.cached_tokens == HELD * BLOCK
        assert got.last.local_tokens == 0


async def test_a_decode_worker_fetches_from_another_one() -> None:
    async with decode() as peer, decode("decode-1") as target, router_to(peer) as warming, router_to(target) as router:
        await warming.answer(PROMPT[: HELD * BLOCK], 1)
        await right_answer(router, peer=held_by(peer))
        assert fetched(target) == HELD


async def test_a_peer_is_nothing_to_a_decode_worker_that_has_all_it_holds() -> None:
    async with prefill() as peer, decode() as target, router_to(target) as router:
        await router.answer(PROMPT[: HELD * BLOCK], 1, request_id="warm")
        await right_answer(router, peer=held_by(peer))
        assert target.metric("peer_pull_failures_total", reason="transfer_failed") == fetched(target) == 0


@pytest.mark.parametrize("is_split", [True, False])
async def test_whoever_is_named_as_its_own_peer_computes(is_split: bool) -> None:
    async with prefill() as source, decode() as target, router_to(target) as router:
        await right_answer(router, source=source if is_split else None, peer=held_by(source if is_split else target))
        assert computed(source if is_split else target) >= BLOCKS * BLOCK
        assert fetched(source) == fetched(target) == 0


# A pull of what is resident


@pytest.mark.parametrize("is_prefill", [True, False])
async def test_what_is_resident_is_served_by_both_roles_and_pinned_while_the_call_is_open(is_prefill: bool) -> None:
    async with prefill() if is_prefill else decode() as worker, contextlib.aclosing(Puller(worker.info)) as puller:
        if is_prefill:
            await warm(worker, PROMPT)
        else:
            async with router_to(worker) as router:
                await router.answer(PROMPT, 1)
        before = computed(worker)
        call = puller.pull(PROMPT[: BLOCKS * BLOCK], wanted=[3, 4, 7], cached_only=True)
        messages = await puller.pages(call, 3)
        assert [page.block for page in pages_in(messages)] == [3, 4, 7]
        assert sum(message.computed for message in messages) == 0
        assert worker.host.pool.count(PageState.ACTIVE) == 3
        assert computed(worker) == before
        call.cancel()


@pytest.mark.parametrize("is_prefill", [True, False])
async def test_what_is_not_resident_ends_the_call_at_once_and_is_never_computed(is_prefill: bool) -> None:
    async with prefill() if is_prefill else decode() as worker, contextlib.aclosing(Puller(worker.info)) as puller:
        refusal = await puller.refusal(puller.pull(PROMPT[: BLOCKS * BLOCK], wanted=[5, 6], cached_only=True))
        assert isinstance(refusal, TransferFailed)
        assert "block 5 is not cached here" in refusal.message
        assert computed(worker) == 0
        assert worker.is_idle


async def test_pages_that_are_still_arriving_are_not_waited_for() -> None:
    async with (
        prefill(model=SLOW, schedule=BY_BLOCK) as worker,
        contextlib.aclosing(Puller(worker.info)) as puller,
    ):
        building = puller.pull(PROMPT[: BLOCKS * BLOCK])
        await puller.pages(building, 1)
        refusal = await puller.refusal(puller.pull(PROMPT[: BLOCKS * BLOCK], wanted=[11], cached_only=True))
        assert isinstance(refusal, TransferFailed)
        assert computed(worker) < BLOCKS * BLOCK
        building.cancel()


async def test_workers_that_lack_the_same_prefix_and_name_each_other_do_not_wait_for_each_other() -> None:
    async with (
        prefill("one") as one,
        prefill("two") as two,
        decode() as target,
        decode("decode-1") as second,
        router_to(target) as router,
        router_to(second) as to_second,
    ):
        await asyncio.gather(
            right_answer(router, source=one, peer=held_by(two)),
            right_answer(to_second, source=two, peer=held_by(one)),
        )
        assert computed(one) + computed(two) >= BLOCKS * BLOCK
