"""How many tokens a step has on a fast processor, and on a slow one."""

from __future__ import annotations

import pytest

from twostroke.scheduler.cost import StepCost
from twostroke.scheduler.step_tokens import LONGEST_S, MOST_TOKENS, tokens_within


@pytest.mark.parametrize(("token_s", "tokens"), [(0.0004, 512), (0.001, 256), (0.003, 128), (0.1, 128)])
def test_a_step_has_as_many_tokens_as_take_a_bearable_time(token_s: float, tokens: int) -> None:
    assert tokens_within(StepCost(prompt_step_s=0.002, prompt_token_s=token_s), 128) == tokens


def test_attention_counts_too() -> None:
    pair_s = LONGEST_S / (512 * 512 / 2)
    assert tokens_within(StepCost(prompt_token_s=1e-9, prompt_pair_s=1.01 * pair_s), 128) == 256


def test_unknown_costs_change_nothing_and_many_tokens_stay() -> None:
    assert tokens_within(StepCost(), 128) == 128
    assert tokens_within(StepCost(prompt_token_s=1e-9), 2 * MOST_TOKENS) == 2 * MOST_TOKENS
