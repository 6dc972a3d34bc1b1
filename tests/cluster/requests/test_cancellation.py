"""A client leaves, aborts or runs out of time, in every stage: all is given back, and nobody computes on for it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from tests.cluster.processes import PATIENCE_S, Client, ProcessCluster, running_cluster
from tests.hand_cut import messages_of
from tests.metrics_page import total
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.rpc.v1 import inference_pb2

PACED = ModelConfig(model="paced:step_ms=10,prefill_tokens_per_s=800,max_model_len=1600", served_model_name="tiny")
PAGES = 100
POOL = CacheConfig(kv_cache_memory_bytes=PAGES * 16_384)
TWO_AT_ONCE = ScheduleConfig(max_num_seqs=2, max_num_batched_tokens=64, local_prefill=False)
POLICY = "round-robin"
"""It always names the prefill worker, so that prompts are pulled whatever the machine has taught the router."""
LONG = 1000
"""Tokens of an answer that nobody waits for: ten seconds of steps."""

module_loop = pytest.mark.asyncio(loop_scope="module")
numbers = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProcessCluster]:
    async with running_cluster(
        prefill=1, decode=1, model=PACED, cache=POOL, schedule=TWO_AT_ONCE, policy=POLICY
    ) as started:
        yield started


@dataclass(frozen=True)
class Victim:
    """A request that will not see its end."""

    is_there: Callable[[Seen], bool]
    """It has reached the stage that is meant."""
    prompt_tokens: int = 40
    max_tokens: int = LONG
    n: int = 1
    blockers: int = 0
    """Answers that take both slots of the decode worker."""
    request_id: str = field(default_factory=lambda: f"victim-{next(numbers)}")
    said: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    """What it was told over gRPC."""


@dataclass(frozen=True)
class Seen:
    """What has happened since the test began, and what is there now."""

    held: float
    waiting: int
    running: int
    pulled: float
    sampled: float
    preempted: float
    arriving: int


class Watch:
    def __init__(self, cluster: ProcessCluster) -> None:
        self._cluster = cluster
        self._before = self._counted()

    async def see(self) -> Seen:
        load = await self._cluster.load("decode-0")
        pulled, sampled, preempted = (now - then for now, then in zip(self._counted(), self._before, strict=True))
        held = total(self._cluster.http, "twostroke_queued_requests")
        return Seen(held, load.waiting, load.running, pulled, sampled, preempted, load.pages_arriving)

    async def until(self, is_there: Callable[[Seen], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_there(await self.see()):
                await asyncio.sleep(0.005)

    def _counted(self) -> tuple[float, float, float]:
        names = ("twostroke_pull_bytes_total", "twostroke_sampled_tokens_total", "twostroke_preemptions_total")
        return tuple(self._cluster.metric("decode-0", name) for name in names)  # type: ignore[return-value]


STAGES = {
    "queued": Victim(lambda seen: seen.held + seen.waiting > 0, blockers=2),
    "pulling": Victim(lambda seen: seen.pulled > 0 and seen.arriving > 0, prompt_tokens=1450, max_tokens=100),
    "running": Victim(lambda seen: seen.sampled > 2),
    "preempted": Victim(lambda seen: seen.preempted > 0, prompt_tokens=1450, max_tokens=140, n=2),
}


@module_loop
@pytest.mark.parametrize(
    ("stage", "way"),
    [("running", "abort"), ("running", "stream"), ("queued", "body"), ("pulling", "cancel"), ("preempted", "cancel")]
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("running", "cancel"), ("running", "body"), ("queued", "cancel"), ("pulling", "body"))
    ],
)
async def test_who_leaves_in_any_stage_leaves_nothing(cluster: ProcessCluster, stage: str, way: str) -> None:
    victim, watch = dataclasses.replace(STAGES[stage], said=[]), Watch(cluster)
    client = Client(cluster.grpc)
    blockers = [asyncio.create_task(client.tokens(fresh(40), max_tokens=LONG)) for _ in range(victim.blockers)]
    await watch.until(lambda seen: seen.running == victim.blockers)
    asked = asyncio.create_task(ASKING[way](cluster, client, victim))
    await watch.until(victim.is_there)
    assert not asked.done()
    if way == "abort":
        stranger = await client.stub.Abort(inference_pb2.AbortRequest(request_id=victim.request_id))
        assert not stranger.found
        await watch.until(lambda _: bool(victim.said))
        found = await client.stub.Abort(inference_pb2.AbortRequest(resume_token=victim.said[-1].resume_token))
        assert found.found
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asked
        assert ended.value.code() is grpc.StatusCode.CANCELLED
    await ends(asked, *blockers)
    await client.close()
    await cluster.assert_quiet()
    assert (await watch.see()).sampled < LONG / 2, "tokens were made for nobody"


async def ends(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def fresh(tokens: int) -> list[int]:
    """A prompt that has no block in common with any other."""
    number = next(numbers)
    return [(number * 7919 + position) % 30_000 for position in range(tokens)]


async def call(cluster: ProcessCluster, client: Client, victim: Victim) -> None:
    options = {"max_tokens": victim.max_tokens, "n": victim.n, "request_id": victim.request_id}
    async for message in client.stream(fresh(victim.prompt_tokens), **options):
        victim.said.append(message)


async def post(cluster: ProcessCluster, client: Client, victim: Victim, **fields: object) -> list[dict[str, object]]:
    """All events of a stream, or the body that is the only one."""
    body = {"prompt": fresh(victim.prompt_tokens), "max_tokens": victim.max_tokens, "n": victim.n, **fields}
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as http,
        http.stream("POST", f"{cluster.http}/v1/completions", json=body) as answer,
    ):
        told = await answer.aread()
    return messages_of(told) if answer.headers["content-type"].startswith("text/event-stream") else [json.loads(told)]


async def post_stream(cluster: ProcessCluster, client: Client, victim: Victim) -> None:
    await post(cluster, client, victim, stream=True)


async def post_body(cluster: ProcessCluster, client: Client, victim: Victim) -> None:
    await post(cluster, client, victim)


ASKING = {"cancel": call, "abort": call, "stream": post_stream, "body": post_body}


@module_loop
@pytest.mark.parametrize(
    ("stage", "stream"),
    [
        ("queued", False),
        pytest.param("queued", True, marks=pytest.mark.slow),
        pytest.param("running", False, marks=pytest.mark.slow),
        ("running", True),
    ],
)
async def test_a_deadline_ends_as_one_with_what_was_sent_intact(
    cluster: ProcessCluster, stage: str, stream: bool
) -> None:
    victim, client, watch = STAGES[stage], Client(cluster.grpc), Watch(cluster)
    blockers = [asyncio.create_task(client.tokens(fresh(40), max_tokens=LONG)) for _ in range(victim.blockers)]
    await watch.until(lambda seen: seen.running == victim.blockers)
    # Nobody is refused who leaves a second before the first token.
    timeout_s = 0.7 if stage == "queued" else 2.0
    *sent, last = await post(cluster, client, victim, stream=stream, timeout=timeout_s, return_token_ids=True)
    error = last["error"]
    assert isinstance(error, dict)
    # What is predicted to be late may be refused before it is.
    assert error["type"] in (["timeout_error", "overloaded_error"] if stage == "queued" else ["timeout_error"])
    assert bool(sent) == (stage == "running" and stream)
    assert not any(choice["finish_reason"] for event in sent for choice in event["choices"])  # type: ignore[attr-defined]
    await ends(*blockers)
    await client.close()
    await cluster.assert_quiet()
    assert (await watch.see()).sampled < LONG / 2, "tokens were made for nobody"


@module_loop
async def test_choices_that_come_to_a_stop_string_are_not_computed_on(cluster: ProcessCluster) -> None:
    client, watch = Client(cluster.grpc), Watch(cluster)
    (body,) = await post(cluster, client, Victim(lambda _: True, n=4), stop=["e"])
    choices = body["choices"]
    assert isinstance(choices, list)
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 4
    assert len({len(choice["text"]) for choice in choices}) > 1, "they should end at different times"
    await client.close()
    await cluster.assert_quiet()
    assert (await watch.see()).sampled < LONG / 2


@module_loop
async def test_who_leaves_at_any_moment_leaves_nothing(cluster: ProcessCluster) -> None:
    """Between any two awaits of router and workers: opened and closed at once, closed before it is opened."""
    draws, client, watch = random.Random(4), Client(cluster.grpc), Watch(cluster)

    async def come_and_go() -> None:
        for _ in range(12):
            victim = Victim(lambda _: True, prompt_tokens=draws.choice((8, 100, 600)), n=draws.choice((1, 3)))
            asked = asyncio.create_task(call(cluster, client, victim))
            await asyncio.sleep(draws.choice((0.0, 0.01, 0.05, 0.2)) * draws.random())
            await ends(asked)

    await asyncio.gather(*(come_and_go() for _ in range(24)))
    await client.close()
    sampled = (await watch.see()).sampled
    assert sampled < 10 * LONG, "of half a million tokens that all of them would have got"
    await cluster.assert_quiet()
    assert (await watch.see()).sampled < sampled + LONG / 2, "tokens were made for nobody"
