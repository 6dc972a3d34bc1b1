"""The step target follows the costs of the machine."""

from __future__ import annotations

import pytest

from twostroke.scheduler.cost import StepCost
from twostroke.scheduler.step_target import PLANNED_FRACTION, SLOWER, USUAL_S, StepTarget


def lone(seconds: float) -> StepCost:
    return StepCost(step_s=seconds)


def test_a_slower_machine_has_a_longer_target() -> None:
    target = StepTarget()
    assert target.most_s(lone(0.004)) == target.most_s(StepCost()) == USUAL_S, "shorter steps are not noticed"
    assert target.most_s(lone(0.017)) == pytest.approx(SLOWER * 0.017)
    assert target.most_s(lone(0.03)) == pytest.approx(0.1), "longer ones are"
    assert target.most_s(lone(0.3)) == pytest.approx(0.6), "a prompt beside them still gets half of the time"


def test_what_the_operator_says_holds_whatever_steps_cost() -> None:
    assert StepTarget(0.08).most_s(lone(0.004)) == 0.08
    assert StepTarget(0.08, usual_s=0.04).most_s(lone(0.004)) == 0.08
    assert StepTarget(usual_s=0.04).most_s(lone(0.017)) == 0.04


@pytest.mark.parametrize("target", [StepTarget(limit_s=0.05), StepTarget(0.08, 0.05), StepTarget(None, 0.05, 0.06)])
def test_no_step_is_meant_to_be_as_long_as_the_time_between_tokens_that_was_promised(target: StepTarget) -> None:
    for cost in (lone(0.004), lone(0.017), lone(0.3)):
        assert target.most_s(cost) <= target.most_for_late_s(cost) == PLANNED_FRACTION * 0.05


def test_for_a_late_prompt_steps_are_as_long_as_what_was_promised_to_streams_allows() -> None:
    promised = StepTarget(limit_s=0.2)
    assert promised.most_s(lone(0.004)) == USUAL_S
    assert promised.most_for_late_s(lone(0.004)) == PLANNED_FRACTION * 0.2
    assert StepTarget().most_for_late_s(lone(0.004)) == USUAL_S, "nothing was promised to streams"
    assert StepTarget(0.06, 0.2).most_for_late_s(lone(0.004)) == 0.06, "the operator wants that kept"
