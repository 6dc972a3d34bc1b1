"""What a worker that leaves is worth to others: whole chains, the latest first, as many as they have room for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.unit.worker.callers import router_to
from tests.unit.worker.pulls.peers import BLOCKS, PROMPT, computed, fetched, warm
from tests.unit.worker.rig import BLOCK, decode, expected_tokens, prefill
from twostroke.base.ids import BlockHash
from twostroke.kv_cache.groups.full_group import CachedBlock
from twostroke.rpc.v1 import control_pb2
from twostroke.worker.services import cache_handoff
from twostroke.worker.services.cache_handoff import Chain, SuccessorChains, divide, hottest_chains, pages_to_give


def name(text: str) -> BlockHash:
    return BlockHash(text.encode().ljust(16))


def block(text: str, parent: str, last_used: int) -> CachedBlock:
    return CachedBlock(name(text), name(parent), last_used)


def test_chains_are_whole_and_come_most_recently_used_first() -> None:
    cached = [
        block("a", "root", 9),
        block("a1", "a", 8),
        block("a2", "a", 5),
        block("a21", "a2", 4),
        block("b", "root", 7),
        block("orphan", "gone", 1),
    ]
    chains = list(hottest_chains(cached))
    assert chains == [
        Chain(name("root"), (name("a"), name("a1")), 2),
        Chain(name("root"), (name("b"),), 1),
        Chain(name("root"), (name("a"), name("a2"), name("a21")), 2),
        Chain(name("gone"), (name("orphan"),), 1),
    ]
    assert chains[2].cut(1) == Chain(name("root"), (name("a"), name("a2")), 1)
    assert chains[2].cut(5) is chains[2]


@pytest.mark.timeout(10)
def test_parents_in_a_circle_end_where_it_closes() -> None:
    circle = [block("a", "c", 1), block("b", "a", 2), block("c", "b", 3), block("leaf", "c", 4)]
    assert [chain.block_hashes for chain in hottest_chains(circle)] == [tuple(map(name, ("a", "b", "c", "leaf")))]


def test_heirs_share_by_first_blocks_and_get_what_they_have_room_for() -> None:
    chains = [
        Chain(name("root"), (name("a"), name("a1")), 2),
        Chain(name("root"), (name("b"), name("b1")), 2),
        Chain(name("root"), (name("a"), name("a2"), name("a3")), 2),
        Chain(name("root"), (name("c"),), 1),
    ]
    first, second = SuccessorChains(control_pb2.Successor(), 3), SuccessorChains(control_pb2.Successor(), 2)
    divide(chains, [first, second])
    assert first.chains == [chains[0], Chain(name("root"), (name("a"), name("a2")), 1)]
    assert second.chains == [chains[1]]


@pytest.mark.parametrize(
    ("free", "pinned", "given"), [(0, 0, 50), (0, 40, 30), (35, 40, 35), (80, 10, 80), (0, 100, 0)]
)
def test_pinned_pages_of_a_successor_are_no_room(free: int, pinned: int, given: int) -> None:
    assert pages_to_give(control_pb2.Load(pages_total=100, pages_free=free, pages_pinned=pinned)) == given


async def test_a_prompt_cached_on_a_drained_prefill_worker_is_a_hit_at_its_heir() -> None:
    async with (
        prefill("leaving") as leaving,
        prefill("successor") as successor,
        decode() as target,
        router_to(target) as router,
    ):
        await warm(leaving, PROMPT)
        lost = control_pb2.Successor(worker_id="lost", address="127.0.0.1:1", epoch="1.0000000000000000")
        living = control_pb2.Successor(
            worker_id="successor", address=successor.info.address, epoch=successor.info.epoch
        )
        assert await leaving.worker.drain(10.0, [lost, living]) == 0
        await leaving.worker.shutdown()
        got = await router.answer(PROMPT, 6, source=successor)
        assert got.tokens == expected_tokens(PROMPT, 6)
        assert computed(successor) == 0
        assert got.last.cached_tokens == BLOCKS * BLOCK


async def test_a_worker_that_works_out_who_gets_what_goes_on_talking(monkeypatch: pytest.MonkeyPatch) -> None:
    async with prefill("leaving") as leaving, prefill("successor") as successor:
        await warm(leaving, PROMPT)
        is_asked, loop = threading.Event(), asyncio.get_running_loop()

        def slow_chains(cached: list[CachedBlock]) -> list[Chain]:
            loop.call_soon_threadsafe(is_asked.set)
            assert is_asked.wait(60), "the event loop stands still"
            return list(hottest_chains(cached))

        monkeypatch.setattr(cache_handoff, "hottest_chains", slow_chains)
        living = control_pb2.Successor(
            worker_id="successor", address=successor.info.address, epoch=successor.info.epoch
        )
        assert await leaving.worker.drain(10.0, [living]) == 0
        assert fetched(successor) == BLOCKS
