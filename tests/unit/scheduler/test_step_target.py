"""The step target follows the costs of the machine."""

from __future__ import annotations

import pytest

from twostroke.scheduler.cost import StepCost
from twostroke.scheduler.step_target import SLOWER, USUAL_S, StepTarget


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
    assert StepTarget(0.08, limit_s=0.02).most_s(lone(0.004)) == 0.08


def test_no_step_is_meant_to_be_longer_than_the_time_between_tokens_that_was_promised() -> None:
    assert StepTarget(limit_s=0.05).most_s(lone(0.017)) == 0.05
