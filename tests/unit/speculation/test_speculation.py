"""Chances of drafted tokens, and how many of them a step runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from twostroke.config import DRAFT_MODEL
from twostroke.scheduler.constraints.drafting import MOST_HARM, draft_lengths
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.speculation.draft import NOTHING, Draft, Proposal
from twostroke.speculation.drafters import ModelDrafter
from twostroke.speculation.speculation import PRIOR, Acceptance, DraftPrice, Outcome, Speculation


class Scripted:
    def __init__(self, *proposals: Proposal | None) -> None:
        self._proposals = itertools.cycle(proposals)

    def propose(self, known: Sequence[int], most: int) -> Proposal | None:
        return next(self._proposals)


def test_chances_follow_what_became_of_proposals_of_the_kind() -> None:
    acceptance = Acceptance()
    good, bad = Proposal((1, 2), "good"), Proposal((1, 2), "bad")
    for _ in range(100):
        for proposal, drawn in ((good, (1, 2, 3)), (bad, (5,))):
            speculation = Speculation([Scripted(proposal)], acceptance)
            speculation.propose([0], 2)
            speculation.drawn(drawn, 0)
    assert acceptance.chance("good") > 0.95
    assert acceptance.chance("bad") < 0.05
    assert acceptance.chance("never tried") == PRIOR


def test_an_answer_that_goes_its_own_way_is_believed_more_than_others() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance.observe("kind", True)
    speculation = Speculation([Scripted(Proposal((1,), "kind"))], acceptance)
    (before,) = speculation.propose([0], 1).chances
    for _ in range(32):
        speculation.propose([0], 1)
        speculation.drawn((2,), 0)
    (after,) = speculation.propose([0], 1).chances
    assert before > 0.9
    assert after < before / 2


def test_the_drafter_that_expects_more_right_tokens_is_heard() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.observe("wrong", False)
    proposals = Proposal((1, 2, 3), "wrong"), None, Proposal((), "empty"), Proposal((4,), "fair")
    draft = Speculation([Scripted(each) for each in proposals], acceptance).propose([0], 3)
    assert draft.tokens == (4,)


def test_what_is_certain_is_drafted_whole_and_others_go_on_behind_it() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance.observe("poor", False)
    forced = Scripted(Proposal((1, 2), "forced", is_certain=True))
    disagreeing = Scripted(Proposal((1, 3, 4, 5, 6, 7, 8, 9), "kind"))
    agreeing = Scripted(Proposal((1, 2, 3, 4), "kind"))
    poor = Scripted(Proposal((1, 2, 9), "poor"))
    alone = Speculation([forced, disagreeing], acceptance).propose([0], 9)
    assert alone == Draft((1, 2), (1.0, 1.0))
    beyond = Speculation([disagreeing, poor, agreeing, forced], acceptance).propose([0], 9)
    assert beyond == Draft((1, 2, 3, 4), (1.0, 1.0, PRIOR, PRIOR**2))


def test_nothing_is_learned_of_a_drafter_from_tokens_that_had_to_come() -> None:
    acceptance = Acceptance()
    forced = Scripted(Proposal((1, 2), "forced", is_certain=True))
    for _ in range(50):
        speculation = Speculation([forced, Scripted(Proposal((1, 2, 3), "kind"))], acceptance)
        speculation.propose([0], 3)
        speculation.drawn((1, 2, 9), 3)
    assert acceptance.chance("kind") < 0.1


def test_what_was_run_and_kept_is_told() -> None:
    told: list[Outcome] = []
    drafter = Scripted(Proposal((1, 2, 3), "kind"))
    speculation = Speculation([drafter], Acceptance(), lambda kind, outcome: told.append(outcome))
    for drawn, run in (((1, 2, 9), 3), ((1, 2, 3, 4), 3), ((9,), 2), ((1,), 0)):
        speculation.propose([0], 3)
        speculation.runs(DraftPrice(row_s=0.25, token_s=2.0))
        speculation.drawn(drawn, run)
    speculation.drawn((1, 2), 1)
    expected = [Outcome(3, 2, 4.0, 0.75), Outcome(3, 3, 6.0, 0.75), Outcome(2, 0, 0.0, 0.5)]
    assert told == expected, "nothing is told of what was not proposed"
    assert speculation.outcome == Outcome(8, 5, 10.0, 2.0)


def test_tokens_that_a_grammar_forces_behind_a_wrong_draft_are_not_kept_ones() -> None:
    told: list[Outcome] = []
    drafter = Scripted(Proposal((1, 2, 3), "kind"))
    speculation = Speculation([drafter], Acceptance(), lambda kind, outcome: told.append(outcome))
    for known in ((9, 5, 6, 7), (1, 9, 6, 7)):
        speculation.propose([0], 3)
        speculation.drawn(known, 3)
    assert [each.kept for each in told] == [0, 1]


def gain(lengths: Sequence[int], drafts: Sequence[Draft], cost: StepCost, step: StepTerms) -> float:
    """Tokens per second of a step with so many tokens of each draft."""
    tokens = step.streams + sum(sum(draft.chances[:length]) for draft, length in zip(drafts, lengths, strict=True))
    return tokens / (cost.of(step) + cost.stream_s * sum(lengths))


@pytest.mark.parametrize("seed", range(30))
def test_no_other_lengths_make_more_tokens_per_second(seed: int) -> None:
    draw = random.Random(seed)
    drafts = []
    for _ in range(draw.randint(1, 3)):
        chances = tuple(sorted((draw.random() for _ in range(draw.randint(0, 4))), reverse=True))
        drafts.append(Draft(tuple(range(len(chances))), chances))
    cost = StepCost(step_s=1.0, stream_s=draw.random(), context_token_s=1e-3)
    step = StepTerms(streams=len(drafts) + draw.randint(0, 4), context_tokens=100)
    lengths = draft_lengths(drafts, cost, step, 100)
    choices = itertools.product(*(range(len(draft.tokens) + 1) for draft in drafts))
    best = max(gain(choice, drafts, cost, step) for choice in choices)
    assert gain(lengths, drafts, cost, step) == pytest.approx(best)


def test_a_draft_behind_which_nothing_sound_was_drawn_kept_nothing() -> None:
    told: list[Outcome] = []
    drafter = Scripted(Proposal((1, 2), "kind"))
    speculation = Speculation([drafter], Acceptance(), lambda kind, outcome: told.append(outcome))
    speculation.propose([0], 2)
    speculation.runs(DraftPrice(row_s=0.25, token_s=2.0))
    speculation.drawn((), 2)
    assert (told[0].run, told[0].kept, told[0].saved_s) == (2, 0, 0.0)


def test_streams_without_drafts_do_not_wait_long_for_those_that_have_some() -> None:
    cost = StepCost(step_s=0.01, stream_s=0.002)
    drafts = [Draft((1,) * 32, (0.99,) * 32)]
    alone = draft_lengths(drafts, cost, StepTerms(streams=1), most=100)
    beside = draft_lengths(drafts, cost, StepTerms(streams=2), most=100)
    assert alone == [32]
    assert 0 < beside[0] <= (MOST_HARM - 1) * cost.of(StepTerms(streams=2)) / cost.stream_s


def test_a_step_runs_no_more_drafted_tokens_than_it_has_room_for() -> None:
    draft = Draft((1, 2, 3), (0.9, 0.8, 0.7))
    cost, step = StepCost(step_s=1.0), StepTerms(streams=2, context_tokens=10)
    assert sum(draft_lengths([draft, draft], cost, step, 4)) == 4
    assert draft_lengths([draft, NOTHING], cost, step, 0) == [0, 0]


def test_nothing_is_drafted_before_costs_are_known() -> None:
    assert draft_lengths([Draft((1,), (1.0,))], StepCost(), StepTerms(streams=1), 9) == [0]


def test_a_draft_model_that_was_wrong_is_tried_again_after_enough_other_answers() -> None:
    acceptance = Acceptance()
    first = acceptance.chance(DRAFT_MODEL)
    for _ in range(500):
        acceptance.observe(DRAFT_MODEL, False)
    assert acceptance.chance(DRAFT_MODEL) < 0.05
    for _ in range(100):
        acceptance.fade(DRAFT_MODEL)
    assert acceptance.chance(DRAFT_MODEL) > 0.9 * first


def test_what_is_foreseen_without_the_draft_model_changes_nothing() -> None:
    drafter, acceptance = ModelDrafter(), Acceptance()
    speculation = Speculation([drafter, Scripted(Proposal((7,), "kind"))], acceptance)
    drafter.drafted([0], (1, 2, 3))
    assert speculation.propose([0], 3).tokens == (1, 2, 3)
    assert speculation.foreseen([0], 3).tokens == (7,)
    before = speculation.model_chance
    speculation.drawn((1, 2, 3, 4), 3)
    assert speculation.model_chance > before
    assert speculation.outcome.kept == 3
