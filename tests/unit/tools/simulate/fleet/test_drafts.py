"""Simulated decode workers that draft: the live scheduler chooses lengths, seeded draws say what was right."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.unit.tools.simulate.fleet.fleets import ALONE, COST, SMALL, chats, row, run, trace
from tools.simulate.fleet.results import SimulatedRun, Status
from tools.simulate.fleet.shape import DraftShape, FleetShape
from tools.simulate.fleet.worker.drafts import WRONG, SimulatedDrafter, lone_stream_step
from tools.simulate.fleet.worker.steps import TOKEN
from tools.simulate.planning.demand import capacity_of
from twostroke.config import Role
from twostroke.scheduler.cost import StreamStep

ONE_AT_ONCE = trace([row(20.0 * number, 20, 400, number) for number in range(6)])
CHEAP_ROWS = dataclasses.replace(COST, stream_s=0.0005, context_token_s=0.0)


def drafting(shape: FleetShape, *acceptance: float, share: float = 1.0) -> FleetShape:
    return dataclasses.replace(shape, drafts=DraftShape.of_chances(acceptance, share))


def token_s(simulated: SimulatedRun) -> float:
    """Mean seconds per token after the first."""
    means = [outcome.itl_mean_s for outcome in simulated.outcomes if outcome.itl_mean_s is not None]
    return sum(means) / len(means)


def test_proposals_are_right_as_often_as_their_shape_says_at_each_place() -> None:
    drafter = SimulatedDrafter(DraftShape.of_chances((0.9, 0.5), 0.75), random.Random(1))
    proposals = [drafter.propose([TOKEN], 3) for _ in range(20_000)]
    proposed = [each.tokens for each in proposals if each is not None]
    assert len(proposed) / len(proposals) == pytest.approx(0.75, abs=0.02)
    for place, share in enumerate((0.9, 0.9 * 0.5, 0.9 * 0.5 * 0.5)):
        right = sum(WRONG not in tokens[: place + 1] for tokens in proposed)
        assert right / len(proposed) == pytest.approx(share, abs=0.02)
    assert all(len(tokens) == 3 for tokens in proposed)


def test_proposals_are_as_long_as_their_shape_says_and_the_long_ones_are_right_for_long() -> None:
    drafter = SimulatedDrafter(DraftShape(proposed=(0.8, 0.5, 0.2), right=(0.6, 0.3, 0.1)), random.Random(1))
    proposals = [drafter.propose([TOKEN], 8) for _ in range(20_000)]
    proposed = [() if each is None else each.tokens for each in proposals]
    for place, (length, right) in enumerate(((0.8, 0.6), (0.5, 0.3), (0.2, 0.1), (0.0, 0.0))):
        longer = [tokens for tokens in proposed if len(tokens) > place]
        were_right = [tokens for tokens in longer if WRONG not in tokens[: place + 1]]
        assert len(longer) / len(proposed) == pytest.approx(length, abs=0.02)
        assert len(were_right) / len(proposed) == pytest.approx(right, abs=0.02)
    assert all(len(tokens) == 3 for tokens in proposed if tokens[:3] == (TOKEN,) * 3)


@pytest.mark.parametrize(("acceptance", "share"), [(0.9, 1.0), (0.6, 1.0), (0.8, 0.5)])
def test_a_lone_stream_gains_what_the_price_of_rows_and_the_chances_say(acceptance: float, share: float) -> None:
    shape = drafting(dataclasses.replace(ALONE, cost=CHEAP_ROWS), acceptance, share=share)
    without = run(ONE_AT_ONCE, dataclasses.replace(shape, drafts=None))
    found = run(ONE_AT_ONCE, shape)
    assert shape.drafts is not None
    each = lone_stream_step(shape.drafts, CHEAP_ROWS)
    expected_s = CHEAP_ROWS.with_streams(each).of_streams(1, 0) / each.tokens
    assert token_s(without) == pytest.approx(CHEAP_ROWS.of_streams(1, 0), rel=0.01)
    assert token_s(found) == pytest.approx(expected_s, rel=0.08), "drafts end with their answer"
    assert token_s(found) < 0.8 * token_s(without)


def test_drafts_that_are_never_right_cost_little() -> None:
    shape = dataclasses.replace(ALONE, cost=CHEAP_ROWS)
    assert token_s(run(ONE_AT_ONCE, drafting(shape, 0.0))) == pytest.approx(token_s(run(ONE_AT_ONCE, shape)), rel=0.03)


def test_every_answer_has_its_length_whatever_is_drafted() -> None:
    load = chats(60)
    for acceptance in (1.0, 0.7, 0.0):
        found = run(load, drafting(SMALL, acceptance))
        assert {outcome.status for outcome in found.outcomes} == {Status.DONE}
        lengths = {outcome.index: outcome.output_tokens for outcome in found.outcomes}
        assert lengths == {index: each.output_tokens for index, each in enumerate(load.rows)}
        decoded = sum(use.output_tokens for use in found.workers if use.role is Role.DECODE)
        assert decoded == sum(lengths.values())
        assert found.gaps.tokens == decoded - len(lengths)
        assert found.unequal_indexes == ()


def test_first_tokens_are_predicted_as_well_where_tokens_are_drafted() -> None:
    """Slots are scarce: a first token waits for answers to end, which takes fewer steps."""
    narrow = dataclasses.replace(ALONE, cost=CHEAP_ROWS, max_num_seqs=2)
    load = trace([row(0.3 * number, 20, 100, number) for number in range(60)])
    waits = run(load, narrow).outcomes[-1], run(load, drafting(narrow, 0.95)).outcomes[-1]
    without_s, with_s = (each.predicted_ttft_s for each in waits)
    assert without_s is not None
    assert with_s is not None
    assert with_s < 0.7 * without_s


def test_a_planner_counts_the_tokens_that_a_lone_stream_gets() -> None:
    shape = drafting(dataclasses.replace(ALONE, cost=CHEAP_ROWS), 0.9)
    assert capacity_of(shape).cost.of_streams(1, 0) < 0.5 * CHEAP_ROWS.of_streams(1, 0)
    assert capacity_of(dataclasses.replace(shape, drafts=None)).cost == CHEAP_ROWS
    nothing = DraftShape.of_chances((0.0,))
    assert lone_stream_step(nothing, CHEAP_ROWS) == StreamStep()
