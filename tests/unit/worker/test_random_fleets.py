"""Whole workers under random demands: whatever happens to a request, its tokens are right and nothing is left of it.

Two prefill and two decode workers have few pages, so answers are preempted. Prompts share prefixes, pages come from
sources and peers, transfers fail and steps fail, clients close, move to another worker with what they have, or have a
deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tests.trials.chaos.injection.fake_transport import Delay, Fail, Fault, FaultPlan, FlipByte
from tests.unit.worker.callers import Received, Router, router_to
from tests.unit.worker.rig import BLOCK, PAGE_BYTES, VOCAB, Running, decode, prefill, prompt_of
from tests.unit.worker.services.test_fetch import fetch
from twostroke.base.errors import ServeError
from twostroke.config import ModelConfig, ScheduleConfig
from twostroke.kv_cache.block import block_hashes_of
from twostroke.rpc.peer import PeerPrefix
from twostroke.scheduler.batch import Batch, StepResult
from twostroke.worker.steps.engine_check import MOST_FAILED_STEPS, PROBE_TOKENS

REQUESTS = 24
FAILED_TRANSFERS = 0.2
PATIENCE_S = 60.0

Prompt = tuple[int, ...]


class RandomPlan(FaultPlan):
    def __init__(self, draws: random.Random) -> None:
        super().__init__()
        self._draws = draws

    def next_transfer(self) -> Fault | None:
        self.pulls += 1
        faults = [Fail(), Delay(0.03), FlipByte(0, 3), Delay(0.01)]
        return self._draws.choice(faults) if self._draws.random() < FAILED_TRANSFERS else None


def paced(window: int, prefill_tokens_per_s: float) -> ModelConfig:
    speed = f"prefill_tokens_per_s={prefill_tokens_per_s},step_ms=2,step_us_per_seq=0"
    layers = f",window={window}" if window else ""
    return ModelConfig(model=f"paced:{speed},vocab={VOCAB},page_bytes={PAGE_BYTES}{layers},max_model_len=512")


def fail_steps(worker: Running, draws: random.Random) -> None:
    """Fails some steps, fewer than a worker takes for a broken engine."""
    runner = worker.host.engine._runner
    run, fails = runner.run, [draws.randint(10, 200) for _ in range(MOST_FAILED_STEPS - 1)]
    steps = itertools.count()

    def failing(batch: Batch) -> StepResult:
        if len(batch.tokens) != PROBE_TOKENS and next(steps) in fails:
            raise RuntimeError("device lost")
        return run(batch)

    runner.run = failing  # type: ignore[method-assign]


@dataclass
class Fleet:
    sources: list[Running]
    decoders: list[tuple[Running, Router]]
    alone: Router
    """A worker of its own: what it answers is right."""
    draws: random.Random
    prefixes: list[Prompt]

    @property
    def workers(self) -> list[Running]:
        return [*self.sources, *(worker for worker, _ in self.decoders)]

    def prompt(self) -> Prompt:
        draws, base = self.draws, self.draws.choice(self.prefixes)
        own = prompt_of(draws.randint(1, 40), seed=draws.randint(0, 30))
        return (*base[: draws.randint(1, len(base))], *own)[:380]

    async def client(self, name: str) -> None:
        """One request, over as many attempts as it takes. It may be closed, or refused with an error."""
        draws, prompt, count = self.draws, self.prompt(), self.draws.randint(1, 60)
        await asyncio.sleep(draws.random())
        right = (await self.alone.answer(prompt, count, request_id=name)).tokens
        emitted: list[int] = []
        for attempt in range(count):
            with contextlib.suppress(ServeError):
                got = await self._open(prompt, count, name, attempt, emitted)
                ends = draws.random() < 0.25
                if not ends and (attempt > 2 or draws.random() < 0.7):
                    await self._to_the_end(got, emitted, right)
                    return
                await asyncio.sleep(draws.random() * 0.4)
                if got.done.is_set():
                    await self._to_the_end(got, emitted, right)
                    return
                await self._close(name, attempt)
                emitted = emitted + got.tokens
                assert emitted == right[: len(emitted)]
                if ends or len(emitted) >= count:
                    return
                continue
            return

    async def _open(self, prompt: Prompt, count: int, name: str, attempt: int, emitted: list[int]) -> Received:
        draws = self.draws
        _, router = draws.choice(self.decoders)
        options: dict[str, object] = {"deadline_s": time.time() + draws.random()} if draws.random() < 0.1 else {}
        peer = PeerPrefix(draws.choice(self.workers).source, draws.randint(1, 10)) if draws.random() < 0.3 else None
        source = draws.choice([None, *self.sources, *self.sources])
        asked = {"request_id": name, "attempt": attempt, "source": source, "peer": peer, "emitted": emitted}
        return await router.open(prompt, count, **asked, **options)

    async def _close(self, name: str, attempt: int) -> None:
        for _, router in self.decoders:
            await router.close(name, attempt)

    async def _to_the_end(self, got: Received, emitted: list[int], right: list[int]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await got.done.wait()
        tokens = emitted + got.tokens
        assert tokens == right[: len(tokens)]
        assert got.last.error.kind or tokens == right

    async def fetches(self) -> None:
        """Workers ask each other for blocks that nobody has asked for."""
        for _ in range(6):
            await asyncio.sleep(self.draws.random() * 0.4)
            at, source = self.draws.sample(self.workers, 2)
            with contextlib.suppress(ServeError):
                await fetch(at, source, block_hashes_of(self.draws.choice(self.prefixes), BLOCK))

    async def check_nothing_is_left(self) -> None:
        for worker in self.workers:
            await asyncio.wait_for(worker.idle(), PATIENCE_S)
            assert not any(group.committed for group in worker.host.pool.others)
            assert all(page.waiters is None for page in worker.host.pool._pages)


@contextlib.asynccontextmanager
async def random_fleet(draws: random.Random) -> AsyncIterator[Fleet]:
    window, rate = draws.choice([0, 0, 64, 20]), draws.choice([2000, 5000, 20000])
    schedule = ScheduleConfig(max_num_seqs=draws.choice([3, 8]), max_num_batched_tokens=draws.choice([32, 64, 256]))
    settings = {"model": paced(window, rate), "schedule": schedule, "pages": draws.choice([40, 50, 70])}
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        sources = [await enter(prefill(f"prefill-{n}", plan=RandomPlan(draws), **settings)) for n in range(2)]
        decoders = [await enter(decode(f"decode-{n}", plan=RandomPlan(draws), **settings)) for n in range(2)]
        alone = await enter(decode("alone", pages=128, model=paced(window, 1e6)))
        for worker in (*sources, *decoders):
            fail_steps(worker, draws)
        routers = [(worker, await enter(router_to(worker))) for worker in decoders]
        prefixes = [prompt_of(draws.randint(3, 24) * BLOCK, seed=100 + number) for number in range(4)]
        yield Fleet(sources, routers, await enter(router_to(alone)), draws, prefixes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
async def test_any_course_of_requests_has_the_right_tokens_and_leaves_nothing(seed: int) -> None:
    async with random_fleet(random.Random(seed)) as fleet:
        async with asyncio.TaskGroup() as tasks:
            for number in range(REQUESTS):
                tasks.create_task(fleet.client(f"request-{number}"))
            tasks.create_task(fleet.fetches())
        await fleet.check_nothing_is_left()
