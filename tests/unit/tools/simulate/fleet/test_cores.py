"""Steps on a simulated host: as long as they take alone, longer beside another one, shorter on borrowed cores."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.tools.simulate.fleet.fleets import row, trace
from tools.simulate.fleet.event_queue import EventQueue
from tools.simulate.fleet.results import SimulatedRun, Status
from tools.simulate.fleet.shape import CoreSpeeds, FleetShape, SharedCores
from tools.simulate.fleet.worker.shared_cores.cores import BORROW_AFTER_S, HostCores, RunningStep
from tools.simulate.runs import Trial, run_trial
from twostroke.base.errors import ConfigError
from twostroke.scheduler.cost import StepCost
from twostroke.scheduler.lateness import WaitingPrompts

SPEEDS = CoreSpeeds(borrowed=0.5, beside=1.5)
SHAPE = FleetShape(
    prefill=1, decode=1, block_size=16, prefill_pages=2000, decode_pages=2000, page_bytes=1000, step_tokens=128,
    max_num_seqs=64, local_prefill=True,
    cost=StepCost(step_s=0.008, stream_s=0.0005, prompt_step_s=0.005, prompt_token_s=0.0005),
    cores=SharedCores(streams=CoreSpeeds(borrowed=0.8, beside=1.2), prompts=CoreSpeeds(borrowed=0.55, beside=1.1)),
)  # fmt: skip


class Host:
    """Two workers' cores, and when their steps ended."""

    def __init__(self) -> None:
        self.queue = EventQueue()
        self.host = HostCores(self.queue)
        self.cores = (self.host.join(), self.host.join())
        self.ended: dict[str, float] = {}
        self.steps: dict[str, RunningStep] = {}

    def step(self, name: str, worker: int, at_s: float, seconds: float, *, borrows: bool = False) -> None:
        def done() -> None:
            self.ended[name] = self.queue.now_s

        def begin() -> None:
            self.steps[name] = RunningStep([(seconds, SPEEDS)], borrows, done)
            self.host.begin(self.cores[worker], self.steps[name])

        self.queue.at(at_s, begin)

    def run(self) -> dict[str, float]:
        self.queue.at(100.0, self.queue.stop)
        self.queue.run()
        return self.ended


def test_a_step_alone_takes_what_it_costs() -> None:
    host = Host()
    host.step("alone", 0, 1.0, 0.1)
    assert host.run() == {"alone": pytest.approx(1.1)}


def test_a_core_whose_owner_pauses_is_borrowed_at_once() -> None:
    host = Host()
    host.step("owner's", 1, 0.9, 0.1)
    host.step("prompt", 0, 1.0005, 0.1, borrows=True)
    host.queue.at(1.0005, lambda: host.host.lend(host.cores[1]))
    assert host.run()["prompt"] == pytest.approx(1.0505)


def test_steps_that_overlap_are_longer_for_as_long_as_they_do() -> None:
    host = Host()
    host.step("long", 0, 1.0, 0.2)
    host.step("short", 1, 1.1, 0.04)
    assert host.run() == {"short": pytest.approx(1.16), "long": pytest.approx(1.1 + 0.06 + (0.1 - 0.04))}


def test_a_core_is_borrowed_once_its_owner_has_idled_and_given_back_when_that_begins() -> None:
    host = Host()
    host.step("before", 1, 0.9, 0.1)
    host.step("borrows", 0, 1.0, 0.2, borrows=True)
    host.step("owner", 1, 1.05, 0.04)
    borrowed_s = 0.05 - BORROW_AFTER_S
    done_s = BORROW_AFTER_S + borrowed_s / 0.5 + 0.04 + BORROW_AFTER_S
    ended = host.run()
    assert ended["owner"] == pytest.approx(1.11)
    assert ended["borrows"] == pytest.approx(1.11 + BORROW_AFTER_S + (0.2 - done_s) * 0.5)
    assert (host.steps["borrows"].most_borrowed, host.steps["owner"].most_borrowed) == (1, 0)


def test_a_worker_hears_of_the_prompts_of_the_others() -> None:
    host = Host()
    host.cores[0].prompts = WaitingPrompts(2, has_late=True)
    assert host.host.prompts_beside(host.cores[1]) == WaitingPrompts(2, has_late=True)
    assert host.host.prompts_beside(host.cores[0]) == WaitingPrompts()


def played(shape: FleetShape) -> SimulatedRun:
    """Streams that last run beside one long prompt after the other."""
    rows = [row(0.01 * number, 64, 600, number) for number in range(4)]
    rows += [row(3.0 + 1.5 * number, 1024, 8, 100 + number) for number in range(6)]
    return run_trial(Trial(variant="kv", trace=trace(rows), shape=shape, holds=True))


def first_tokens_s(run: SimulatedRun) -> float:
    assert {outcome.status for outcome in run.outcomes} == {Status.DONE}
    return sum(outcome.ttft_s or 0.0 for outcome in run.outcomes[4:])


def test_prompts_come_sooner_where_cores_are_borrowed_and_later_where_they_are_shared_at_all() -> None:
    shared = first_tokens_s(played(SHAPE))
    assert SHAPE.cores is not None
    unborrowed = dataclasses.replace(SHAPE, cores=dataclasses.replace(SHAPE.cores, borrows=False))
    apart = dataclasses.replace(SHAPE, cores=None)
    assert shared < first_tokens_s(played(unborrowed))
    assert first_tokens_s(played(apart)) < first_tokens_s(played(unborrowed))


def test_a_run_on_shared_cores_is_the_same_again() -> None:
    noisy = dataclasses.replace(SHAPE, noise=0.1)
    assert played(noisy).outcomes == played(noisy).outcomes


@pytest.mark.parametrize(
    ("cores", "field"),
    [
        (SharedCores(streams=CoreSpeeds(borrowed=0)), "cores.streams.borrowed"),
        (SharedCores(prompts=CoreSpeeds(beside=0.9)), "cores.prompts.beside"),
        (SharedCores(between_s=-1.0), "cores.between_s"),
    ],
)
def test_speeds_that_no_host_has_are_refused(cores: SharedCores, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        FleetShape(cores=cores)
