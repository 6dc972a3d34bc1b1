"""How many prompt tokens fit into a step beside running streams."""

from __future__ import annotations

import pytest

from twostroke.schedule.cost import MIN_PROMPT_TOKENS, Budget, StepCost

COST = StepCost(step_s=0.008, stream_s=0.0005, context_token_s=1e-6, prompt_token_s=0.0005)


def test_what_streams_leave_of_the_target_goes_to_prompts() -> None:
    budget = Budget(0.04, COST, 10_000)
    assert budget.prompt_tokens(4, 4000) == int((0.04 - 0.008 - 0.002 - 0.004) / 0.0005)
    assert budget.prompt_tokens(16, 4000) < budget.prompt_tokens(4, 4000)
    assert budget.prompt_tokens(4, 8000) < budget.prompt_tokens(4, 4000)


def test_prompts_never_starve_however_long_the_streams_take() -> None:
    assert Budget(0.001, COST, 10_000).prompt_tokens(64, 100_000) == MIN_PROMPT_TOKENS


def test_predictions_are_trusted_only_so_far() -> None:
    assert Budget(10.0, COST, 100).prompt_tokens(1, 10) == 100
    assert Budget(0.04, StepCost(step_s=0.01), 32).prompt_tokens(1, 10) == 32, "the cost of prompt tokens is unknown"


def test_a_prompt_beside_streams_waits_for_their_share_of_each_step_too() -> None:
    budget = Budget(0.04, COST, 10_000)
    tokens = budget.prompt_tokens(4, 4000)
    assert budget.seconds_per_prompt_token(4, 4000) * tokens == pytest.approx(0.04, rel=0.02)
    assert budget.seconds_per_prompt_token(0, 0) == COST.prompt_token_s
