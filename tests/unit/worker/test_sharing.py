"""A worker whose streams nobody hurries for leaves its cores to prompts that wait beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.unit.scheduler.bench import Bench
from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import decode, eventually, prompt_of
from twostroke.profiler import WORK_LOOP, Slice
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.scheduler.step_target import StepTarget
from twostroke.worker.steps.rates import Rates
from twostroke.worker.steps.sharing import Sharing

STEP_S = 0.01


@dataclass
class FakeNeighbours:
    beside: int = 0
    told: list[int] = field(default_factory=list)

    def tell_prompts(self, count: int) -> None:
        self.told.append(count)

    def prompts_beside(self) -> int:
        return self.beside


def rates_of(cost: StepCost) -> Rates:
    rates = Rates()
    rates.cost = cost
    return rates


def bench_with_streams(count: int) -> Bench:
    bench = Bench(200)
    for number in range(count):
        bench.answer([number + 1] * 3)
    bench.admit()
    bench.step()
    return bench


@pytest.mark.parametrize(("prompts", "streams", "times"), [(0, 1, 0), (1, 1, 5), (1, 8, 1.5), (4, 8, 3), (16, 8, 9)])
def test_the_pause_grows_with_the_prompts_beside_and_falls_with_the_streams_here(
    prompts: int, streams: int, times: float
) -> None:
    bench = bench_with_streams(streams)
    sharing = Sharing(bench.scheduler, rates_of(StepCost(step_s=STEP_S)), StepTarget(), FakeNeighbours(prompts))
    assert sharing.pause_s(STEP_S) == pytest.approx(max(0.0, min(times * STEP_S, 0.05) - STEP_S))
    assert sharing.pause_s(1.0) <= 0, "the latest step is long ago"


def test_a_worker_of_its_own_device_never_pauses() -> None:
    bench = bench_with_streams(1)
    assert Sharing(bench.scheduler, rates_of(StepCost(step_s=STEP_S)), StepTarget()).pause_s(0.0) == 0


def test_it_does_not_pause_with_a_prompt_of_its_own_and_tells_the_others_of_it() -> None:
    bench, neighbours = bench_with_streams(1), FakeNeighbours(1)
    sharing = Sharing(bench.scheduler, rates_of(StepCost(step_s=STEP_S)), StepTarget(), neighbours)
    bench.answer([7] * 40)
    bench.admit()
    assert sharing.pause_s(0.0) == 0
    step = bench.scheduler.plan()
    assert step is not None
    sharing.tell(step)
    bench.scheduler.update(step, bench.runner.run(step))
    assert StepTerms.of(step.batch).prompt_tokens
    sharing.tell(bench.scheduler.plan())
    assert neighbours.told == [1, 0]


async def test_a_first_token_does_not_wait_for_the_end_of_a_pause() -> None:
    neighbours = FakeNeighbours()
    async with decode() as worker, router_to(worker) as router:
        loop = worker.host.loop
        loop._sharing = Sharing(worker.host.scheduler, loop.rates, StepTarget(3600.0), neighbours)
        running = await router.open(prompt_of(20), 200)
        await eventually(lambda: len(running.tokens) >= 2)
        neighbours.beside = 1
        first = await router.open(prompt_of(21), 1, request_id="other")
        await first.done.wait()
        assert len(first.tokens) == 1
        assert len(running.tokens) < 200, "it waits for an hour"
        neighbours.beside = 0
        loop.wake()
        await running.done.wait()


async def test_a_profile_shows_the_pauses_beside_the_other_parts_of_the_loop() -> None:
    neighbours = FakeNeighbours()
    async with decode() as worker, router_to(worker) as router:
        loop = worker.host.loop
        loop._sharing = Sharing(worker.host.scheduler, loop.rates, StepTarget(3600.0), neighbours)
        with worker.host.engine.profiler.recording() as profile:
            running = await router.open(prompt_of(20), 200)
            await eventually(lambda: len(running.tokens) >= 2)
            neighbours.beside = 1
            await (await router.open(prompt_of(21), 1, request_id="other")).done.wait()
            neighbours.beside = 0
            loop.wake()
            await running.done.wait()
        parts = {item.name for item in profile.items if isinstance(item, Slice) and item.track == WORK_LOOP}
        assert parts == {"admit", "plan", "build batch", "send", "update", "pause"}
