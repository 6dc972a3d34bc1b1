"""A worker whose streams nobody hurries for leaves its cores to prompts that wait beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest

from tests.unit.scheduler.bench import Bench
from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import decode, eventually, prefill, prompt_of
from twostroke.observability.profiler import WORK_LOOP, Slice
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.scheduler.lateness import WaitingPrompts
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.step_target import PLANNED_FRACTION, StepTarget
from twostroke.worker.measured.rates import Rates
from twostroke.worker.steps.sharing import TimeSharing

STEP_S = 0.01
NOW_S = 50.0
COST = StepCost(step_s=STEP_S, prompt_token_s=0.002)
"""80 tokens of a prompt take 0.21 s beside 8 streams: five steps of 16 tokens."""


@dataclass
class FakeNeighbours:
    beside: WaitingPrompts = field(default_factory=WaitingPrompts)
    told: list[WaitingPrompts] = field(default_factory=list)
    lent: int = 0

    def tell_prompts(self, prompts: WaitingPrompts) -> None:
        self.told.append(prompts)

    def prompts_beside(self) -> WaitingPrompts:
        return self.beside

    def measuring(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def lend(self) -> None:
        self.lent += 1


def sharing_of(bench: Bench, target: StepTarget, neighbours: FakeNeighbours | None) -> TimeSharing:
    rates = Rates()
    rates.cost = COST
    return TimeSharing(bench.scheduler, rates, target, lambda: NOW_S, neighbours)


def bench_with_streams(count: int) -> Bench:
    bench = Bench(200)
    for number in range(count):
        bench.answer([number + 1] * 3)
    bench.admit()
    bench.step()
    return bench


@pytest.mark.parametrize(("prompts", "streams", "times"), [(0, 1, 0), (1, 1, 9), (1, 8, 2), (16, 8, 2), (1, 4, 3)])
def test_a_worker_pauses_for_prompts_beside_it_the_shorter_the_more_streams_it_has(
    prompts: int, streams: int, times: float
) -> None:
    bench = bench_with_streams(streams)
    sharing = sharing_of(bench, StepTarget(), FakeNeighbours(WaitingPrompts(prompts)))
    assert sharing.pause_s(STEP_S) == pytest.approx(max(0.0, min(times * STEP_S, 0.05) - STEP_S))
    assert sharing.pause_s(1.0) <= 0, "the latest step is long ago"


def test_a_worker_of_its_own_device_never_pauses() -> None:
    bench = bench_with_streams(1)
    assert sharing_of(bench, StepTarget(), None).pause_s(0.0) == 0


def test_it_does_not_pause_with_a_prompt_of_its_own_and_tells_the_others_of_it() -> None:
    bench, neighbours = bench_with_streams(1), FakeNeighbours(WaitingPrompts(1))
    sharing = sharing_of(bench, StepTarget(), neighbours)
    bench.answer([7] * 40)
    bench.admit()
    assert sharing.pause_s(0.0) == 0
    step = bench.scheduler.plan()
    assert step is not None
    sharing.report_waiting(step)
    bench.scheduler.update(step, bench.runner.run(step))
    assert StepTerms.of(step.batch).prompt_tokens
    sharing.report_waiting(bench.scheduler.plan())
    one, none = neighbours.told
    assert (one.count, none) == (1, WaitingPrompts())
    assert one.waiting_s > 0


@pytest.mark.parametrize(("late", "seconds"), [(False, 0.02), (True, PLANNED_FRACTION * 0.2)])
def test_streams_are_as_slow_as_was_promised_to_them_while_a_prompt_beside_them_would_be_late(
    late: bool, seconds: float
) -> None:
    bench = bench_with_streams(8)
    sharing = sharing_of(bench, StepTarget(limit_s=0.2), FakeNeighbours(WaitingPrompts(1, has_late=late)))
    assert sharing.pause_s(0.0) == pytest.approx(seconds)


@pytest.mark.parametrize(("left_s", "late"), [(0.3, False), (0.25, True), (-1.0, True)])
def test_a_prompt_that_would_be_late_has_a_longer_step_here_and_the_neighbours_are_told(
    left_s: float, late: bool
) -> None:
    bench, neighbours = bench_with_streams(8), FakeNeighbours()
    sharing = sharing_of(bench, StepTarget(limit_s=0.2), neighbours)
    assert sharing.budget.step_s(8, 0) == pytest.approx(0.02)
    bench.answer([7] * 80).due_s = NOW_S + left_s
    bench.admit()
    longest_s = PLANNED_FRACTION * 0.2
    assert sharing.budget.step_s(8, 0) == pytest.approx(longest_s if late else 0.02)
    sharing.report_waiting(bench.scheduler.plan())
    told = neighbours.told[-1]
    assert (len(neighbours.told), told.count, told.has_late) == (1, 1, late)


async def test_what_the_cluster_promises_reaches_every_request_of_either_role() -> None:
    async with prefill(slo_ttft_s=3600.0) as source, decode(slo_ttft_s=3600.0) as target, router_to(target) as router:
        since_s, dues = asyncio.get_running_loop().time(), []
        for worker in (source, target):
            enqueue = worker.host.scheduler.enqueue

            def noted(sequence: Sequence, enqueue: Callable[[Sequence], None] = enqueue) -> None:
                dues.append(sequence.due_s)
                enqueue(sequence)

            vars(worker.host.scheduler)["enqueue"] = noted
        await (await router.open(prompt_of(40), 1, source=source)).done.wait()
    assert [due_s is not None and since_s + 3600 <= due_s < since_s + 3700 for due_s in dues] == [True, True]


async def test_a_first_token_does_not_wait_for_the_end_of_a_pause() -> None:
    neighbours = FakeNeighbours()
    async with decode() as worker, router_to(worker) as router:
        loop = worker.host.loop
        loop._sharing = TimeSharing(worker.host.scheduler, loop.rates, StepTarget(3600.0), lambda: NOW_S, neighbours)
        running = await router.open(prompt_of(20), 200)
        await eventually(lambda: len(running.tokens) >= 2)
        neighbours.beside = WaitingPrompts(1)
        first = await router.open(prompt_of(21), 1, request_id="other")
        await first.done.wait()
        assert len(first.tokens) == 1
        assert len(running.tokens) < 200, "it waits for an hour"
        assert neighbours.lent, "its cores may be borrowed at once meanwhile"
        neighbours.beside = WaitingPrompts()
        loop.wake()
        await running.done.wait()


async def test_a_profile_shows_the_pauses_beside_the_other_parts_of_the_loop() -> None:
    neighbours = FakeNeighbours()
    async with decode() as worker, router_to(worker) as router:
        loop = worker.host.loop
        loop._sharing = TimeSharing(worker.host.scheduler, loop.rates, StepTarget(3600.0), lambda: NOW_S, neighbours)
        with worker.host.engine.profiler.recording() as profile:
            running = await router.open(prompt_of(20), 200)
            await eventually(lambda: len(running.tokens) >= 2)
            neighbours.beside = WaitingPrompts(1)
            await (await router.open(prompt_of(21), 1, request_id="other")).done.wait()
            neighbours.beside = WaitingPrompts()
            loop.wake()
            await running.done.wait()
        parts = {item.name for item in profile.items if isinstance(item, Slice) and item.track == WORK_LOOP}
        assert parts == {"admit", "plan", "build batch", "send", "update", "pause"}
