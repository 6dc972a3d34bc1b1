"""Steps at once: how long they take together, and how many have ended by some moment."""

from __future__ import annotations

import itertools

import pytest

from tools.simulate.fleet.worker.pulls import Wire, carry
from tools.simulate.fleet.worker.steps import ChunksOnly, Flight, StepPace
from twostroke.base.ids import RequestId, SessionId
from twostroke.request import SamplingParams
from twostroke.scheduler.batching import Chunk
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.scheduler.sequence import Sequence


def flight(steps: int = 5) -> Flight:
    """Returns a flight of steps of 1.0, 1.5, 2.0, ... seconds."""
    return Flight(ChunksOnly().build([]), StepTerms(), 10.0, 1.0, 0.5, 0.0, (), steps)


def test_each_step_is_a_little_longer_than_the_one_before() -> None:
    ends = [flight().after(steps) for steps in range(6)]
    assert [late - early for early, late in itertools.pairwise(ends)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0])
    assert flight().end_s == pytest.approx(20.0)


@pytest.mark.parametrize(("now_s", "ended"), [(10.0, 0), (10.9, 0), (11.0, 1), (12.4, 1), (12.5, 2), (99.0, 5)])
def test_steps_that_have_ended_are_counted(now_s: float, ended: int) -> None:
    assert flight().ended_by(now_s) == ended


def test_a_flight_is_cut_after_the_step_that_runs() -> None:
    running = flight()
    assert running.cut(12.0)
    assert running.steps == 2
    assert not running.cut(12.0)


def test_noisy_steps_take_what_they_cost_on_average() -> None:
    sequence = Sequence(RequestId("0#0"), SessionId(1), [0] * 9, 9, [], sampling=SamplingParams(seed=0, max_tokens=9))
    step = ChunksOnly().build([Chunk(sequence, 8, 9, samples=True)])
    pace = StepPace(StepCost(step_s=1.0), 0.5, "seed")
    flights = [pace.flight(step, 0.0, repeats=3) for _ in range(1000)]
    assert sum(each.end_s for each in flights) / 4000 == pytest.approx(1.0, abs=0.05)
    assert len({each.first_s for each in flights}) == 1
    assert len({each.after(1) for each in flights}) == 1000


def test_a_wire_carries_one_thing_at_a_time_in_each_direction() -> None:
    one, two, three = Wire(100.0), Wire(100.0), Wire(50.0)
    assert carry(one, two, 100.0, 1.0) == 2.0
    assert carry(two, one, 100.0, 1.0) == 2.0, "there and back at once"
    assert carry(three, two, 100.0, 1.0) == 4.0, "after what came first, at the slower end's pace"
    assert carry(one, three, 50.0, 1.0) == 3.0
