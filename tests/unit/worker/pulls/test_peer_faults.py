"""Peers that are damaged, slow, gone, of another epoch or not what was thought: what they held is computed."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.trials.chaos.injection.fake_transport import Delay, Expire, Fail, Fault, FaultPlan, FlipByte, WriteLate
from tests.unit.worker.callers import router_to, with_epoch
from tests.unit.worker.pulls.peers import (
    BLOCKS,
    BY_BLOCK,
    HELD,
    PROMPT,
    computed,
    failures,
    fetched,
    held_by,
    right_answer,
    warm,
)
from tests.unit.worker.rig import BLOCK, decode, eventually, expected_tokens, paced, prefill, prompt_of
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.rpc.v1 import worker_pb2
from twostroke.worker.supply import remote


@pytest.mark.parametrize(
    "fault",
    [Fail(), Expire(), FlipByte(copy=2, offset=3), WriteLate(), Delay(60.0)],
    ids=lambda fault: type(fault).__name__,
)
@pytest.mark.parametrize("is_split", [True, False])
async def test_a_fetch_that_fails_ends_in_computation(
    fault: Fault, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 0.2)
    plan = FaultPlan({0: fault})
    async with (
        prefill("holder") as peer,
        prefill("source", plan=plan if is_split else None) as source,
        decode(plan=None if is_split else plan) as target,
        router_to(target) as router,
    ):
        await warm(peer, PROMPT[: HELD * BLOCK])
        got = await right_answer(router, source=source if is_split else None, peer=held_by(peer))
        computing = source if is_split else target
        assert failures(computing, "transfer_failed") == 1
        arrived = 2 if isinstance(fault, FlipByte) else 0
        assert fetched(computing) == arrived
        assert got.last.cached_tokens == arrived * BLOCK
        assert computing.host.pool.count(PageState.QUARANTINED) == 0


async def test_a_peer_that_has_less_than_was_thought_gives_what_it_has() -> None:
    async with (
        prefill("holder") as peer,
        prefill("source") as source,
        decode() as target,
        router_to(target) as router,
    ):
        await warm(peer, PROMPT[: 4 * BLOCK])
        await right_answer(router, source=source, peer=held_by(peer))
        assert fetched(source) == 4
        assert computed(source) == (BLOCKS - 4) * BLOCK
        assert computed(peer) == 4 * BLOCK, "a peer never computes"
        assert failures(source, "transfer_failed") == 1


@pytest.mark.parametrize("is_split", [True, False])
async def test_a_peer_of_another_life_or_that_is_no_more_is_refused_and_counted_one_that_leaves_still_gives(
    is_split: bool,
) -> None:
    nobody = worker_pb2.PageSource(worker_id="prefill-9", address="127.0.0.1:9", epoch="1.1")
    async with (
        prefill("holder") as peer,
        prefill("source") as source,
        decode() as target,
        router_to(target) as router,
    ):
        computing = source if is_split else target
        await warm(peer, PROMPT[: HELD * BLOCK])
        reasons = {"stale_epoch": with_epoch(peer.source, "1.1"), "peer_lost": nobody}
        for seed, (reason, named) in enumerate(reasons.items(), start=1):
            prompt = prompt_of(100, seed=seed)
            options = {"source": source if is_split else None, "peer": held_by(named, 6)}
            got = await router.answer(prompt, 4, request_id=reason, **options)
            assert got.tokens == expected_tokens(prompt, 4)
            assert failures(computing, reason) == 1
        assert peer.metric("stale_epochs_total") == 1
        assert fetched(computing) == 0
        await peer.worker.drain(0)
        await right_answer(router, source=source if is_split else None, peer=held_by(peer.source, HELD))
        assert fetched(computing) == HELD


@pytest.mark.parametrize("is_peer_there", [True, False])
async def test_what_the_peer_of_a_source_that_is_gone_holds_is_fetched_there_before_any_of_it_is_computed(
    is_peer_there: bool,
) -> None:
    nobody = worker_pb2.PageSource(worker_id="prefill-9", address="127.0.0.1:9", epoch="1.1")
    async with prefill("holder") as peer, decode() as target, router_to(target) as router:
        await warm(peer, PROMPT[: HELD * BLOCK])
        peer_of_it = held_by(peer if is_peer_there else with_epoch(peer.source, "1.1"))
        got = await right_answer(router, source=nobody, peer=peer_of_it)
        arrived = HELD if is_peer_there else 0
        assert fetched(target) == arrived
        assert computed(target) == len(PROMPT) - arrived * BLOCK + 5
        assert got.last.cached_tokens == arrived * BLOCK
        assert target.metric("pull_failures_total", reason="peer_lost") == 1
        assert failures(target, "stale_epoch") == (not is_peer_there)


async def test_a_request_that_is_closed_during_a_fetch_frees_everything_everywhere() -> None:
    async with (
        prefill("holder") as peer,
        prefill("source", plan=FaultPlan(every_transfer=Delay(9.0))) as source,
        decode(plan=FaultPlan(every_transfer=Delay(9.0))) as target,
        router_to(target) as router,
    ):
        await warm(peer, PROMPT[: HELD * BLOCK])
        for named in (source, None):
            computing = named or target
            await router.open(PROMPT, 6, request_id="r", source=named, peer=held_by(peer))
            await eventually(lambda computing=computing: computing.plan.pulls == 1)
            await router.close("r")
            for worker in (target, source, peer):
                await worker.idle()
            assert failures(computing, "transfer_failed") == 0, "a pull that is stopped has not failed"
            assert computed(computing) == 0


async def test_a_worker_that_shuts_down_during_a_fetch_leaves_its_peer_nothing_pinned() -> None:
    async with prefill("holder") as peer:
        await warm(peer, PROMPT[: HELD * BLOCK])
        async with (
            prefill("source", plan=FaultPlan(every_transfer=Delay(9.0))) as source,
            decode() as target,
            router_to(target) as router,
        ):
            await router.open(PROMPT, 6, source=source, peer=held_by(peer))
            await eventually(lambda: source.plan.pulls == 1)
            await source.worker.shutdown()
            await peer.idle()
            await router.close()


async def test_a_fetch_is_no_pull_that_could_be_taken_over() -> None:
    """Nobody computes for it at the other end."""
    delay = FaultPlan(every_transfer=Delay(0.3))
    async with (
        prefill() as peer,
        decode(plan=delay, schedule=BY_BLOCK) as target,
        router_to(target) as router,
    ):
        prompts = [prompt_of(4 * BLOCK + 1, seed=seed) for seed in range(4)]
        for prompt in prompts:
            await warm(peer, prompt)
        answers = [await router.open(p, 3, request_id=str(i), peer=held_by(peer, 4)) for i, p in enumerate(prompts)]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        assert [answer.tokens for answer in answers] == [expected_tokens(prompt, 3) for prompt in prompts]
        assert target.metric("local_prefills_total") == 0
        assert fetched(target) == 16


@pytest.mark.parametrize("seed", range(2))
async def test_any_mixture_of_peers_and_faults_ends_in_the_right_tokens_and_empty_books(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 0.1)
    random = Random(seed)
    faults: list[Fault | None] = [None, None, None, Fail(), Expire(), FlipByte(), WriteLate(), Delay(0.02), Delay(9.0)]

    def plan() -> FaultPlan:
        chosen = {transfer: fault for transfer in range(200) if (fault := random.choice(faults)) is not None}
        return FaultPlan(chosen, lost_connects=frozenset(random.sample(range(40), 6)))

    slow, settings = paced(prefill_tokens_per_s=20_000), {"pages": 40, "pull_timeout_s": 0.3}
    async with (
        prefill("one", model=slow, plan=plan(), **settings) as one,
        prefill("two", model=slow, plan=plan(), **settings) as two,
        decode(plan=plan(), **settings) as target,
        decode("decode-1", plan=plan(), **settings) as second,
        router_to(target) as router,
        router_to(second) as to_second,
    ):
        workers = (one, two, target, second)

        async def ask(number: int) -> None:
            prompt = prompt_of(random.randrange(1, 300), seed=random.randrange(10))
            to, peer = random.choice((router, to_second)), random.choice(workers)
            await asyncio.sleep(random.random())
            source = random.choice((one, two, None))
            got = await to.open(
                prompt, 8, request_id=str(number), source=source, peer=held_by(peer, random.randrange(1, 20))
            )
            if random.random() < 0.2:
                await asyncio.sleep(random.random() / 5)
                await to.close(str(number))
                return
            async with asyncio.timeout(60):
                await got.done.wait()
            assert got.tokens == expected_tokens(prompt, 8)

        await asyncio.gather(*map(ask, range(60)))
        for worker in workers:
            await worker.idle()
            worker.plan.transfers, worker.plan.lost_connects = {}, frozenset()
        monkeypatch.undo()
        for number in range(1000, 1100):
            if fetched(target) > 0:
                break
            prompt = prompt_of(4 * BLOCK + 1, seed=number)
            await warm(two, prompt)
            got = await router.answer(prompt, 3, request_id=f"calm-{number}", peer=held_by(two, 4))
            assert got.tokens == expected_tokens(prompt, 3)
        assert fetched(target) > 0, "nothing is broken any more"
