"""Workers with an empty table: nothing of a branch is called, and what asks for one is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.decode_worker.request_states import an_answer
from twostroke.base.errors import UnsupportedFeature
from twostroke.request import Attempt, Grammar, WeightsRef
from twostroke.worker.answers import ASKED, AnswerFeature, features_of
from twostroke.worker.branches import Branches


def asking(speculation: str = "", **sampling: Any) -> Attempt:
    plain = an_answer().attempt
    params = dataclasses.replace(plain.request.sampling, **sampling)
    return dataclasses.replace(
        plain, request=dataclasses.replace(plain.request, sampling=params, speculation=speculation)
    )


ASKS = {
    "grammar": asking(grammar=Grammar('%llguidance {}\nstart: "a"')),
    "prompt_logprobs": asking(prompt_logprobs=1),
    "speculation": asking("lookup"),
}


class Noted:
    """A branch of answers that notes for what it was asked."""

    def __init__(self, field: str, *, is_default: bool) -> None:
        self.field, self.is_default = field, is_default
        self.seen: list[Attempt] = []

    async def feature_of(self, attempt: Attempt, others: Sequence[AnswerFeature]) -> AnswerFeature | None:
        self.seen.append(attempt)
        return AnswerFeature()


def test_every_field_that_asks_for_a_feature_is_tried_here() -> None:
    assert ASKS.keys() == ASKED.keys()


@pytest.mark.parametrize("field", ASKS)
async def test_a_request_for_a_missing_branch_is_refused_with_its_field(field: str) -> None:
    with pytest.raises(UnsupportedFeature, match=field) as refused:
        await features_of(ASKS[field], ())
    assert refused.value.field == field
    assert (await features_of(asking(), ())).each == ()


@pytest.mark.parametrize("field", ASKS)
async def test_a_branch_is_asked_for_the_answers_that_want_it_alone(field: str) -> None:
    asked, default = Noted(field, is_default=False), Noted(field, is_default=True)
    for attempt in (ASKS[field], asking()):
        await features_of(attempt, (asked, default))
    assert len(asked.seen) == 1
    assert len(default.seen) == 2


def test_a_sequence_with_an_adapter_is_refused_where_no_branch_holds_any() -> None:
    with pytest.raises(UnsupportedFeature, match="weights"):
        Branches().constraints_of(WeightsRef(bytes(32)))
    assert Branches().constraints_of(None) == ()
