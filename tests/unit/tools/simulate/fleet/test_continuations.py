"""Prompts that repeat answers find them where they were given."""

from __future__ import annotations

import dataclasses

from tests.unit.tools.simulate.fleet.fleets import ALONE, BLOCK, run, trace
from tools.simulate.fleet.simulation import Continuations, name_of
from tools.simulate.traces.formats import TraceRow

FIRST = TraceRow(0.0, 2 * BLOCK + 3, 3 * BLOCK, (1, 2, 9))
"""Its answer fills blocks 2 to 4."""
SECOND = TraceRow(30.0, 7 * BLOCK + 1, 2, (1, 2, 3, 4, 5, 6, 7, 10))
"""Blocks 3, 4 and 5 are the first's tail and answer."""
THIRD = TraceRow(60.0, 7 * BLOCK + 1, 2, (1, 2, 23, 24, 25, 26, 27, 11))
"""Another continuation of the first, after an answer that was not given."""


def test_a_prompt_that_continues_another_one_has_the_hashes_of_its_answer() -> None:
    names = Continuations(BLOCK, name_of)
    first = names.named(FIRST.blocks[:2], FIRST.input_tokens, FIRST.output_tokens)
    second = names.named(SECOND.blocks[:7], SECOND.input_tokens, SECOND.output_tokens)
    again = names.named(SECOND.blocks[:7], SECOND.input_tokens, SECOND.output_tokens)
    third = names.named(THIRD.blocks[:7], THIRD.input_tokens, THIRD.output_tokens)
    assert first == [name_of(1), name_of(2)]
    assert second[:2] == first
    assert not {second[2], second[3], second[4]} & {name_of(3), name_of(4), name_of(5)}
    assert second[5:] == [name_of(6), name_of(7)]
    assert again == second
    assert third[2:] == [name_of(23), name_of(24), name_of(25), name_of(26), name_of(27)]


def test_the_worker_that_gave_an_answer_need_not_compute_it_again() -> None:
    asked = dataclasses.replace(trace([FIRST, SECOND, THIRD]), repeats_answers=True)
    cached = [outcome.cached_tokens for outcome in run(asked, ALONE).outcomes]
    assert cached == [0, 5 * BLOCK, 2 * BLOCK]
    unaware = dataclasses.replace(asked, repeats_answers=False)
    assert [outcome.cached_tokens for outcome in run(unaware, ALONE).outcomes] == [0, 2 * BLOCK, 2 * BLOCK]
