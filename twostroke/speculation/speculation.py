"""Speculation for one answer: the proposals of its drafters, and how often their tokens were right."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from twostroke.config import DRAFT_MODEL
from twostroke.speculation.draft import NOTHING, Draft, Drafter, Proposal
from twostroke.speculation.drafters import ModelDrafter

PRIOR = 0.5
"""Chance of a token of a kind that was never tried."""
PRIORS = {DRAFT_MODEL: 0.7}
"""Chance of an untried token, for kinds with another prior. A draft model is configured because it often agrees."""
PRIOR_WEIGHT = 4.0
"""Tokens that the prior chance counts for."""
MEMORY = 512.0
"""Tokens of one kind that are remembered: older ones fade."""
OWN_WEIGHT = 8.0
"""The rate over all answers counts like this many tokens of the answer itself."""
OWN_MEMORY = 32.0
"""Tokens that an answer remembers: what it repeats now says little about what it writes later."""

FADING = 0.9
"""Share of the observations of a kind that remains when an answer begins. A draft model that was often wrong is not
run, so nothing new is seen of it. As the past fades, it is tried again."""


class Rate:
    """A share of right tokens. Older tokens count less and less."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.right = 0.0
        self.tried = 0.0

    def observe(self, is_right: bool) -> None:
        fading = 1.0 - 1.0 / self._memory
        self.right = self.right * fading + is_right
        self.tried = self.tried * fading + 1.0

    def fade(self, share: float) -> None:
        """Keeps a share of what was observed."""
        self.right *= share
        self.tried *= share

    def blended(self, chance: float, weight: float) -> float:
        """Returns the share of right tokens, as if `weight` more tokens had been right with `chance`."""
        return (self.right + weight * chance) / (self.tried + weight)


class Acceptance:
    """How often proposals of each kind were right on a worker."""

    def __init__(self) -> None:
        self._kinds: defaultdict[str, Rate] = defaultdict(lambda: Rate(MEMORY))

    def chance(self, kind: str) -> float:
        """Returns the chance that one token of this kind is right, if those before it are."""
        return self._kinds[kind].blended(PRIORS.get(kind, PRIOR), PRIOR_WEIGHT)

    def observe(self, kind: str, is_right: bool) -> None:
        self._kinds[kind].observe(is_right)

    def fade(self, kind: str) -> None:
        """Reduces the weight of past observations of a kind. It is called when an answer begins."""
        self._kinds[kind].fade(FADING)


class DraftPrice(NamedTuple):
    """What drafted tokens cost and bring in one step, by the fitted cost of steps."""

    row_s: float
    """Seconds that the step takes longer for one drafted token."""
    token_s: float
    """Seconds of a step without drafts for each token that it makes known. A kept token saves as much."""


class Outcome(NamedTuple):
    """The result of one draft, or of all drafts of an answer."""

    run: int = 0
    """Tokens that were run."""
    kept: int = 0
    """Tokens of these that were right."""
    saved_s: float = 0.0
    """Seconds of steps that kept tokens have saved."""
    spent_s: float = 0.0
    """Seconds that drafted tokens have made steps longer."""
    draft_s: float = 0.0
    """Seconds that a draft model computed."""

    def plus(self, other: Outcome) -> Outcome:
        return Outcome(*map(operator.add, self, other))


Ran = Callable[[str, Outcome], None]
"""Takes the drafter of a proposal that was run or computed, and its outcome."""
MOST_DRAFTED = 32
"""Most tokens of one draft. Where each is right with a probability of 0.9, all 32 are right one time in thirty."""


class Speculation:
    def __init__(
        self, drafters: Sequence[Drafter], acceptance: Acceptance, ran: Ran = lambda kind, outcome: None
    ) -> None:
        """`ran` is called with the outcome of each draft that was run, and of each computation of a draft model."""
        self._ran = ran
        self._drafters = drafters
        self._others = [each for each in drafters if not isinstance(each, ModelDrafter)]
        self.of_model = next((each for each in drafters if isinstance(each, ModelDrafter)), None)
        """Takes the tokens that a draft model draws. None where no draft model may propose."""
        self._acceptance = acceptance
        self._own: dict[str, Rate] = {}
        """How often tokens of each drafter were right in this answer."""
        self._proposal: Proposal | None = None
        """The proposal for the next or current step, whether or not it is run."""
        self._certain = 0
        """The proposal's leading tokens that are certain: nothing is learned from those."""
        self._price = DraftPrice(0.0, 0.0)
        self.outcomes: dict[str, Outcome] = {}
        """The results of all drafts of this answer, by drafter."""

    @property
    def outcome(self) -> Outcome:
        """The result of all drafts of this answer."""
        return functools.reduce(Outcome.plus, self.outcomes.values(), Outcome())

    def propose(self, known: Sequence[int], most: int) -> Draft:
        """Returns the draft with the most tokens that are expected to be right, of at most `most` tokens."""
        draft, self._proposal, self._certain = self._best(self._drafters, known, most)
        return draft

    def foreseen(self, known: Sequence[int], most: int) -> Draft:
        """Returns what would be proposed without a draft model. It changes no state."""
        return self._best(self._others, known, most)[0]

    @property
    def model_chance(self) -> float:
        """The chance that a token of the draft model is right, if those before it are."""
        return self._chance(DRAFT_MODEL)

    def computed(self, seconds: float) -> None:
        """Notes that a draft model has computed for this answer."""
        self._note(DRAFT_MODEL, Outcome(draft_s=seconds))

    def runs(self, price: DraftPrice) -> None:
        """Notes the price at which the latest proposal is run."""
        self._price = price

    def drawn(self, tokens: Sequence[int], run: int) -> None:
        """Learns from the tokens that became known in the step that ran the first `run` tokens of the latest proposal.

        The token after those also shows whether the next proposed one was right, although that was not run. Certain
        tokens may follow a wrong one.
        """
        proposal, self._proposal = self._proposal, None
        if proposal is None:
            return
        right = 0
        for position, (proposed, token) in enumerate(zip(proposal.tokens, tokens, strict=False)):
            if position >= self._certain:
                self._observe(proposal.kind, proposed == token)
            if proposed != token:
                break
            right += 1
        if run:
            kept = min(run, right)
            self._note(proposal.kind, Outcome(run, kept, kept * self._price.token_s, run * self._price.row_s))

    def _best(self, drafters: Sequence[Drafter], known: Sequence[int], most: int) -> tuple[Draft, Proposal | None, int]:
        """Returns the draft with the most tokens that are expected to be right, and the proposal after it.

        Where a drafter is certain, other proposals count only if they begin with its tokens. The last value is the
        number of those tokens.
        """
        asked = [drafter.propose(known, min(most, MOST_DRAFTED)) for drafter in drafters]
        proposals = [each for each in asked if each is not None and each.tokens]
        certain = next((each.tokens for each in proposals if each.is_certain), ())
        best: Proposal | None = None
        draft = NOTHING
        for proposal in proposals:
            if proposal.tokens[: len(certain)] != certain:
                continue
            chance = self._chance(proposal.kind)
            unsure = range(1, len(proposal.tokens) - len(certain) + 1)
            chances = (1.0,) * len(certain) + tuple([chance**position for position in unsure])
            if sum(chances) > sum(draft.chances):
                best, draft = proposal, Draft(proposal.tokens, chances)
        return draft, best, len(certain)

    def _note(self, kind: str, outcome: Outcome) -> None:
        drafter, _, _ = kind.partition(" ")
        self.outcomes[drafter] = self.outcomes.get(drafter, Outcome()).plus(outcome)
        self._ran(drafter, outcome)

    def _chance(self, kind: str) -> float:
        return self._own_rate(kind).blended(self._acceptance.chance(kind), OWN_WEIGHT)

    def _observe(self, kind: str, is_right: bool) -> None:
        self._acceptance.observe(kind, is_right)
        self._own_rate(kind).observe(is_right)

    def _own_rate(self, kind: str) -> Rate:
        return self._own.setdefault(kind, Rate(OWN_MEMORY))
