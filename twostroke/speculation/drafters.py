"""The table of drafters: what `--speculate` and a request's `speculation` may name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twostroke.config.schedule import DRAFT_MODEL, GRAMMAR_DRAFTER
from twostroke.speculation.answers import AnswerSuffixes, FinishedAnswers
from twostroke.speculation.draft import Drafter
from twostroke.speculation.draft_model import ModelDrafter
from twostroke.speculation.forced_tokens import ForcedRun, ForcedTokens
from twostroke.speculation.prompt_lookup import PromptLookup


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What drafters of one answer may go by."""

    answers: FinishedAnswers
    """Finished answers of the worker."""
    salt: bytes
    """The request's salt."""
    forced_run: ForcedRun | None = None
    """Finds the tokens that the answer's grammar forces. None: they become known without a draft, or it has none."""


Maker = Callable[[AnswerFacts], Drafter | None]

DRAFTERS: dict[str, Maker] = {
    GRAMMAR_DRAFTER: lambda facts: None if facts.forced_run is None else ForcedTokens(facts.forced_run),
    "lookup": lambda facts: PromptLookup(),
    "suffix": lambda facts: AnswerSuffixes(facts.answers, facts.salt),
    DRAFT_MODEL: lambda facts: ModelDrafter(),
}
"""Makes a drafter for one answer; None where it could propose nothing."""


def drafters_of(names: tuple[str, ...], facts: AnswerFacts) -> list[Drafter]:
    made = [DRAFTERS[name](facts) for name in names]
    return [drafter for drafter in made if drafter is not None]
