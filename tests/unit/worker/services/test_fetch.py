"""Fetch: somebody asks a worker to bring named blocks of another one into its cache."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio
import pytest

from tests.trials.chaos.injection.fake_transport import Delay, FaultPlan
from tests.unit.worker.callers import Puller, router_to
from tests.unit.worker.pulls.peers import fetched, warm
from tests.unit.worker.rig import BLOCK, Running, decode, eventually, expected_tokens, prefill, prompt_of
from twostroke.base.errors import Draining, InvalidRequest, StaleEpoch
from twostroke.base.ids import BlockHash
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.convert import hashes_to_bytes
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc

BLOCKS = 8
PROMPT = prompt_of(BLOCKS * BLOCK + 5)
NAMES = block_hashes_of(PROMPT, BLOCK)


async def fetch(at: Running, source: Running, hashes: list[BlockHash] = NAMES, **changes: object) -> int:
    """What the worker answers. Raises the ServeError that it answered with."""
    fields: dict = {
        "fingerprint": at.info.fingerprint,
        "worker_epoch": at.info.epoch,
        "source": source.source,
        "block_hashes": hashes_to_bytes(hashes),
        "root": root_hash(),
        "within_s": 10.0,
    }
    peer = PeerChannel(at.info.address, at.host.config.cluster_token)
    try:
        stub = worker_pb2_grpc.PagesStub(peer.channel)
        return (await stub.Fetch(worker_pb2.FetchRequest(**fields | changes), metadata=peer.metadata)).blocks
    except grpc.aio.AioRpcError as error:
        raise error_of(error, at.info.address) from error
    finally:
        await peer.close()


async def test_blocks_that_were_fetched_are_cached_and_nobody_computes_them() -> None:
    async with (
        decode("leaving") as leaving,
        decode("successor") as successor,
        router_to(leaving) as old,
        router_to(successor) as new,
    ):
        await old.answer(PROMPT, 1)
        leaving.host.validator.is_draining = True
        assert await fetch(successor, leaving, NAMES[:3]) == 3
        assert await fetch(successor, leaving) == BLOCKS
        assert fetched(successor) == BLOCKS
        assert successor.host.pool.count(PageState.CACHED) == BLOCKS
        got = await new.answer(PROMPT, 6)
        assert got.tokens == expected_tokens(PROMPT, 6)
        assert got.last.local_tokens == BLOCKS * BLOCK


async def test_what_the_source_lacks_or_does_not_send_in_time_stays_away_and_nothing_is_held() -> None:
    plan = FaultPlan()
    async with prefill("holder") as holder, prefill("successor", plan=plan) as successor:
        assert await fetch(successor, holder) == 0
        await warm(holder, PROMPT[: 3 * BLOCK])
        assert await fetch(successor, holder) == 3
        await successor.idle()
        await warm(holder, PROMPT)
        plan.every_transfer = Delay(30.0)
        assert await fetch(successor, holder, within_s=0.2) == 3


async def test_blocks_that_are_coming_for_somebody_else_are_waited_for_and_fetched_once() -> None:
    async with (
        prefill("holder") as holder,
        prefill("successor", plan=FaultPlan(every_transfer=Delay(0.2))) as successor,
    ):
        await warm(holder, PROMPT)
        assert await asyncio.gather(*(fetch(successor, holder) for _ in range(3))) == [BLOCKS] * 3
        assert fetched(successor) == BLOCKS


async def test_a_page_that_somebody_begins_to_write_during_the_wait_for_a_later_one_is_waited_for() -> None:
    async with prefill("worker") as worker:
        pool, names, sessions = worker.host.pool, NAMES[:2], [worker.host.new_session() for _ in range(2)]
        claim = pool.claim(names, root_hash(), 0)  # of a sequence that waits for both blocks
        assert claim is not None
        first, second = claim.pages
        pool.assign_writer(second, sessions[1])
        fetching = asyncio.create_task(fetch(worker, worker, names))
        await eventually(lambda: pool._pages[second].waiters is not None)
        pool.assign_writer(first, sessions[0])
        pool.fill(second)
        await eventually(lambda: pool._pages[first].waiters is not None)
        assert not fetching.done()
        pool.fill(first)
        assert await fetching == 2
        pool.release(claim.pages)


async def test_what_is_in_use_is_not_evicted() -> None:
    async with (
        prefill("holder") as holder,
        decode("successor", pages=12) as successor,
        router_to(successor) as router,
    ):
        await warm(holder, PROMPT)
        got = await router.open(prompt_of(6 * BLOCK, seed=5), 60)
        await eventually(lambda: len(got.tokens) > 1)
        assert await fetch(successor, holder) == 4, "half of what was asked for: there is no room for all"
        await router.close()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"worker_epoch": "7.0000000000000000"}, StaleEpoch),
        ({"root": b"short"}, InvalidRequest),
        ({"within_s": float("nan")}, InvalidRequest),
        ({"hashes": [NAMES[0], NAMES[0]]}, InvalidRequest),
    ],
    ids=["epoch", "root", "time", "hashes"],
)
async def test_what_makes_no_sense_is_refused(changes: dict, error: type[Exception]) -> None:
    async with prefill("holder") as holder, prefill("successor") as successor:
        with pytest.raises(error):
            await fetch(successor, holder, **changes)


async def test_a_draining_worker_gives_what_it_has_and_takes_nothing() -> None:
    async with prefill("holder") as holder, prefill("successor") as successor:
        await warm(holder, PROMPT)
        holder.host.validator.is_draining = True
        assert await fetch(successor, holder) == BLOCKS
        with pytest.raises(Draining):
            await fetch(holder, successor)
        async with contextlib.aclosing(Puller(holder.info)) as puller:
            assert isinstance(await puller.refusal(puller.pull(PROMPT)), Draining)
