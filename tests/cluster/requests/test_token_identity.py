"""Real processes, the real model in float32: the same tokens as transformers, whatever happens on the way.

What is slow here happens to small models of every kind in the gate (`test_families.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cluster.processes import TOKEN, Client, ProcessCluster, running_cluster
from tests.cluster.reference import NEW_TOKENS, Reference, mismatches, recorded, references
from tests.cluster.requests.deaths import asked_until, kill_the_busiest
from tests.unit.worker.callers import Puller, Router
from tests.unit.worker.rig import BLOCK
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.worker.host import ReadyInfo

MODEL = ModelConfig(dtype="float32")
PAGE_BYTES = 737_280
"""The size of a 16-token page of the default model in float32."""


@pytest.fixture(scope="module")
def expected() -> list[Reference]:
    found = recorded()
    assert len(found) == 17
    return found


@pytest.mark.slow
def test_the_recorded_answers_are_those_of_transformers(smollm2_dir: Path, expected: list[Reference]) -> None:
    found = references(smollm2_dir)
    assert [(each.name, each.prompt) for each in found] == [(each.name, each.prompt) for each in expected]
    assert mismatches(expected, {each.name: list(each.answer) for each in found}) == []


SOME = (1, 16, 17, 100, 300)
"""Lengths of prompts around block borders, and of several blocks."""
FEW = ("length 16", "length 17", "length 100", "chat 1")
"""Prompts of which streams are open while a worker dies. A token takes 40 ms of the processor in float32."""


@pytest.fixture(scope="module")
def some(expected: list[Reference]) -> list[Reference]:
    names = {f"length {length}" for length in SOME} | {"chat 1", "chat 4"}
    found = [reference for reference in expected if reference.name in names]
    assert len(found) == len(names)
    return found


@asynccontextmanager
async def real_cluster(
    smollm2_dir: Path, prefill: int, decode: int, pages: int = 400, policy: str = "kv", **schedule: int
) -> AsyncIterator[tuple[ProcessCluster, Client]]:
    async with running_cluster(
        prefill=prefill,
        decode=decode,
        model=MODEL,
        model_dir=smollm2_dir,
        cache=CacheConfig(kv_cache_memory_bytes=pages * PAGE_BYTES),
        schedule=ScheduleConfig(**schedule),
        policy=policy,
    ) as cluster:
        client = Client(cluster.grpc)
        yield cluster, client
        await client.close()


async def answers_of(client: Client, expected: list[Reference]) -> dict[str, list[int]]:
    async def ask(reference: Reference) -> list[int]:
        return await client.tokens(reference.prompt, max_tokens=NEW_TOKENS, temperature=0)

    answers = await asyncio.gather(*map(ask, expected))
    return {reference.name: answer for reference, answer in zip(expected, answers, strict=True)}


@pytest.mark.parametrize("prompts", ["some", pytest.param("expected", marks=pytest.mark.slow)])
async def test_split_warm_and_after_a_decode_worker_is_killed_mid_stream_the_tokens_are_those_of_transformers(
    smollm2_dir: Path, prompts: str, request: pytest.FixtureRequest
) -> None:
    expected: list[Reference] = request.getfixturevalue(prompts)
    # A policy that always names the prefill worker, whatever the machine has taught the router.
    async with real_cluster(smollm2_dir, 1, 2, policy="round-robin") as (cluster, client):
        assert mismatches(expected, await answers_of(client, expected)) == []
        assert counted(cluster, "pull_bytes_total") > 0, "nothing was pulled: this was not a split run"
        hits = counted(cluster, "prefix_cache_hits_total")
        cached = sum(len(each.prompt) // 2 for each in expected)
        for _ in range(2):  # by turns at both decode workers
            assert mismatches(expected, await answers_of(client, expected)) == []
        assert counted(cluster, "prefix_cache_hits_total") > hits + cached
        few = [each for each in expected if each.name in FEW]
        assert len(few) == len(FEW)
        is_killed = asyncio.Event()
        asked = asyncio.ensure_future(asked_until(is_killed, lambda: answers_of(client, few)))
        victim = await kill_the_busiest(cluster, {"decode-0", "decode-1"}, 8, asked)
        is_killed.set()
        assert not [wrong for answers in await asked if (wrong := mismatches(few, answers))]
        await cluster.restart(victim)
        assert mismatches(few, await answers_of(client, few)) == []


def counted(cluster: ProcessCluster, name: str) -> float:
    """Returns a metric's sum over the decode workers."""
    return sum(cluster.metric(worker, f"twostroke_{name}") for worker in ("decode-0", "decode-1"))


@pytest.mark.slow
async def test_prompts_of_a_burst_that_are_taken_over_have_the_tokens_of_transformers(
    smollm2_dir: Path, expected: list[Reference]
) -> None:
    """A policy that always names the prefill worker; with short chunks its queue is long from the first moment on."""
    longest = sorted(expected, key=lambda each: -len(each.prompt))[:4]
    chunks = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    async with real_cluster(smollm2_dir, 1, 1, policy="round-robin", **chunks) as (cluster, client):
        token = 500
        while cluster.metric("decode-0", "twostroke_pull_bytes_total") == 0:  # the router knows both workers by then
            token += 1
            await client.tokens([token] * 20, max_tokens=1)
        assert mismatches(longest, await answers_of(client, longest)) == []
        assert 1 <= cluster.metric("decode-0", "twostroke_local_prefills_total") <= 3
        assert cluster.metric("decode-0", "twostroke_pull_failures_total") == 0


@pytest.mark.slow
async def test_colocated_in_odd_chunks_the_tokens_are_those_of_transformers(
    smollm2_dir: Path, some: list[Reference]
) -> None:
    async with real_cluster(smollm2_dir, 0, 1, max_num_batched_tokens=149) as (_, client):
        assert mismatches(some, await answers_of(client, some)) == []


@pytest.mark.slow
async def test_after_preemption_the_tokens_are_those_of_transformers(smollm2_dir: Path, some: list[Reference]) -> None:
    """Three growing answers (3 x 16 pages) do not fit the pool of 45 together, whatever the others do."""
    async with real_cluster(smollm2_dir, 1, 1, pages=45) as (cluster, client):
        growing = [
            asyncio.ensure_future(client.tokens([token], max_tokens=250, temperature=0, ignore_eos=True))
            for token in (504, 1780, 2683)
        ]
        assert mismatches(some, await answers_of(client, some)) == []
        assert [len(answer) for answer in await asyncio.gather(*growing)] == [250] * 3
        assert cluster.metric("decode-0", "twostroke_preemptions_total") > 0


@pytest.mark.slow
async def test_after_the_prefill_worker_is_killed_the_tokens_are_those_of_transformers(
    smollm2_dir: Path, some: list[Reference]
) -> None:
    async with real_cluster(smollm2_dir, 1, 1) as (cluster, client):
        asked = asyncio.ensure_future(answers_of(client, some))
        while cluster.metric("decode-0", "twostroke_pull_bytes_total") == 0:
            await asyncio.sleep(0.02)
        await cluster.kill("prefill-0")
        assert mismatches(some, await asked) == []
        assert cluster.metric("decode-0", "twostroke_pull_failures_total") > 0


HELD = 5
"""Blocks of each prompt that the peer builds before anybody asks for an answer."""


@pytest.mark.slow
async def test_with_prefixes_from_a_peer_the_tokens_are_those_of_transformers_whatever_becomes_of_it(
    smollm2_dir: Path, expected: list[Reference]
) -> None:
    """Fetched by a source, fetched by the decode worker itself, from a peer that hangs, and from one that is dead."""
    chosen = sorted(expected, key=lambda each: -len(each.prompt))[1:5]
    assert all(len(each.prompt) >= (HELD + 2) * BLOCK for each in chosen)
    async with real_cluster(smollm2_dir, 2, 1) as (cluster, _):
        decode, source, peer = (_ready(cluster, name) for name in ("decode-0", "prefill-0", "prefill-1"))
        await _build(peer, chosen)
        async with contextlib.aclosing(await Router(decode, token=TOKEN).connect()) as router:
            answers = {}
            for each, computes in zip(chosen, (source, None, source, None), strict=True):
                if each is chosen[2]:
                    cluster.workers["prefill-1"].process.send_signal(signal.SIGSTOP)
                if each is chosen[3]:
                    await cluster.kill("prefill-1")
                before = _counted(cluster, computes or decode)
                answers[each.name] = await _answer(router, each, computes, PeerPrefix(_page_source(peer), HELD))
                fetched, computed = _since(before, _counted(cluster, computes or decode))
                assert fetched == (HELD if each in chosen[:2] else 0)
                assert computed <= len(each.prompt) - fetched * BLOCK + NEW_TOKENS
        assert mismatches(chosen, answers) == []
        for name in ("prefill-0", "decode-0"):
            assert cluster.metric(name, "twostroke_peer_pull_failures_total") == 1


def _ready(cluster: ProcessCluster, worker: str) -> ReadyInfo:
    return ReadyInfo(**cluster.workers[worker].info)  # type: ignore[arg-type]  # as it was printed


def _page_source(worker: ReadyInfo) -> worker_pb2.PageSource:
    return worker_pb2.PageSource(worker_id=worker.worker_id, address=worker.address, epoch=worker.epoch)


async def _build(worker: ReadyInfo, prompts: list[Reference]) -> None:
    """Lets a prefill worker compute the first blocks of prompts for nobody."""
    async with contextlib.aclosing(Puller(worker, token=TOKEN)) as puller:
        for each in prompts:
            call = puller.pull(each.prompt[: HELD * BLOCK])
            await puller.pages(call, HELD)
            call.cancel()


def _counted(cluster: ProcessCluster, worker: ReadyInfo) -> tuple[float, float]:
    """(blocks fetched from peers, tokens computed)"""
    names = ("twostroke_peer_pulled_blocks_total", "twostroke_computed_tokens_total")
    fetched, computed = (cluster.metric(worker.worker_id, name) for name in names)
    return fetched, computed


def _since(before: tuple[float, float], now: tuple[float, float]) -> tuple[float, float]:
    return now[0] - before[0], now[1] - before[1]


async def _answer(router: Router, asked: Reference, source: ReadyInfo | None, peer: PeerPrefix) -> list[int]:
    message = router.message(asked.prompt, NEW_TOKENS, request_id=asked.name, peer=peer)
    message.request.sampling.temperature = 0
    if source is not None:
        message.source.CopyFrom(_page_source(source))
    got = await router.send(message)
    async with asyncio.timeout(60):
        await got.done.wait()
    return got.tokens
