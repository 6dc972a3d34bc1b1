"""The table of drafters: what `--speculate` and a request's `speculation` may name."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.config import DRAFT_MODEL
from twostroke.speculation.answers import AnswerSuffixes, FinishedAnswers
from twostroke.speculation.draft import Drafter
from twostroke.speculation.draft_model import ModelDrafter
from twostroke.speculation.prompt_lookup import PromptLookup

Maker = Callable[[FinishedAnswers, bytes], Drafter]

DRAFTERS: dict[str, Maker] = {
    "lookup": lambda answers, salt: PromptLookup(),
    "suffix": AnswerSuffixes,
    DRAFT_MODEL: lambda answers, salt: ModelDrafter(),
}
"""Makes a drafter for one answer, of the worker's finished answers and the request's salt."""


def drafters_of(names: tuple[str, ...], answers: FinishedAnswers, salt: bytes) -> list[Drafter]:
    return [DRAFTERS[name](answers, salt) for name in names]
