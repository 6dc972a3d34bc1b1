"""The table of drafters: what `--speculate` and a request's `speculation` may name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.config import DRAFT_MODEL
from twostroke.config.schedule import GRAMMAR_DRAFTER
from twostroke.speculation.answers import AnswerSuffixes, FinishedAnswers
from twostroke.speculation.draft import Drafter, Proposal
from twostroke.speculation.prompt_lookup import PromptLookup

ForcedRun = Callable[[int], Sequence[int]]
"""Returns up to this many tokens that must come next in an answer, as far as that is known."""


class ForcedTokens:
    """Proposes the tokens that the answer's grammar forces. The sampler draws each of them."""

    def __init__(self, forced_run: ForcedRun) -> None:
        self._forced_run = forced_run

    def propose(self, known: Sequence[int], most: int) -> Proposal | None:
        run = self._forced_run(most)
        return Proposal(tuple(run), GRAMMAR_DRAFTER, is_certain=True) if run else None


class ModelDrafter:
    """Proposes what a draft model drew for an answer between two steps of the model."""

    def __init__(self) -> None:
        self._tokens: tuple[int, ...] = ()
        self._known_tokens = 0

    def has_drafted(self, known: Sequence[int]) -> bool:
        """Returns whether tokens were drafted to come after these."""
        return bool(self._tokens) and self._known_tokens == len(known)

    def drafted(self, known: Sequence[int], tokens: tuple[int, ...]) -> None:
        """Keeps the tokens that the draft model has drawn to come after `known`."""
        self._tokens, self._known_tokens = tokens, len(known)

    def propose(self, known: Sequence[int], most: int) -> Proposal | None:
        if not self.has_drafted(known) or not most:
            return None
        return Proposal(self._tokens[:most], DRAFT_MODEL)


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What the drafters of one answer may base their proposals on."""

    answers: FinishedAnswers
    """Finished answers of the worker."""
    salt: bytes
    """The request's salt."""
    forced_run: ForcedRun | None = None
    """Returns the tokens that the answer's grammar forces. None where they become known without a draft, or without a
    grammar."""


Maker = Callable[[AnswerFacts], Drafter | None]

DRAFTERS: dict[str, Maker] = {
    GRAMMAR_DRAFTER: lambda facts: None if facts.forced_run is None else ForcedTokens(facts.forced_run),
    "lookup": lambda facts: PromptLookup(),
    "suffix": lambda facts: AnswerSuffixes(facts.answers, facts.salt),
    DRAFT_MODEL: lambda facts: ModelDrafter(),
}
"""Functions that make a drafter for one answer, by its name. They return None where it could propose nothing."""


def drafters_of(names: tuple[str, ...], facts: AnswerFacts) -> list[Drafter]:
    made = [DRAFTERS[name](facts) for name in names]
    return [drafter for drafter in made if drafter is not None]
