"""Workers of several ranks answer as those that compute whole models."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from tests.cluster.requests.test_families import WITH_EXPERTS, saved_with_tokenizer, tokens_are_kept

KINDS = ("phi3", "gemma3", "deepseek_v3", "qwen2_moe")
"""Dense; with windows; with latents and experts; with experts and a shared one."""
RANKS = ((1, 2), (2, 1), (2, 2))
"""Ranks of the prefill worker, and of each decode worker."""
IN_GATE = (("gemma3", (1, 2)),)


def case(name: str, ranks: tuple[int, int]) -> ParameterSet:
    marks = () if (name, ranks) in IN_GATE else pytest.mark.slow
    return pytest.param(name, ranks, id="{} P{}D{}".format(name, *ranks), marks=marks)


@pytest.mark.parametrize(("name", "ranks"), [case(*each) for each in itertools.product(KINDS, RANKS)])
async def test_tokens_are_those_of_transformers_through_hits_preemptions_and_deaths(
    name: str, ranks: tuple[int, int], tmp_path: Path
) -> None:
    expected = saved_with_tokenizer(name, tmp_path)
    counts_experts = any(part in name for part in WITH_EXPERTS)
    await tokens_are_kept(tmp_path, expected, counts_experts=counts_experts, ranks=ranks)
