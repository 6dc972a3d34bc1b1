"""The features of one answer that shape its steps, and the one table that makes them."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.grammar_metrics import GrammarMetrics
from decode_worker.grammars import Grammars, allows_none
from decode_worker.speculations import SpeculationMetrics, Speculations
from twostroke.base.errors import InvalidRequest, NonFiniteLogits, ServeError
from twostroke.config import SPECULATE_OFF, Role
from twostroke.grammar.state import GrammarState
from twostroke.request import Attempt, GenerateRequest
from twostroke.scheduler.constraints.grammar_run import GrammarRun
from twostroke.scheduler.constraints.scored_prompt import ScoredPrompt
from twostroke.scheduler.sequence import Constraint, Sequence
from twostroke.speculation.speculation import Speculation
from twostroke.worker.role_host import RoleHost


@dataclass(frozen=True, slots=True)
class AnswerFeatures:
    scored: ScoredPrompt | None = None
    grammar: GrammarRun | None = None
    speculation: Speculation | None = None
    """Drafts the answer's tokens. None: nobody does."""

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return tuple([each for each in (self.scored, self.grammar) if each is not None])

    @property
    def drafted(self) -> dict[str, int]:
        """Drafted and kept tokens by drafter, as traces and logs name them."""
        outcomes = {} if self.speculation is None else self.speculation.outcomes
        ran = {name: each for name, each in outcomes.items() if each.run}
        drafted = {f"drafted.{name}": each.run for name, each in ran.items()}
        return drafted | {f"kept.{name}": each.kept for name, each in ran.items()}


class FeatureTable:
    """Makes the features of answers on a decode worker, and learns from those that have ended."""

    def __init__(self, host: RoleHost) -> None:
        registry, role = host.metrics.registry, Role.DECODE.value
        self._block_size = host.facts.block_size
        self._speculations = Speculations(host.config.schedule, host.determinism, SpeculationMetrics(registry, role))
        self.grammars = Grammars(host.facts, GrammarMetrics(registry, role))

    def check(self, attempt: Attempt) -> None:
        """Raises InvalidRequest for a feature that is not served here."""
        if attempt.request.speculation:
            self._speculations.check(attempt)

    def of(self, attempt: Attempt, grammar: GrammarState | None) -> AnswerFeatures:
        """Returns what an answer needs; nothing of a feature is called for a request without it."""
        request = attempt.request
        scored = ScoredPrompt() if attempt.scores_prompt else None
        run = None if grammar is None else GrammarRun(grammar, request.sampling, self._block_size)
        may_draft = self._speculations.names and request.speculation != SPECULATE_OFF
        return AnswerFeatures(scored, run, self._speculations.of(request, grammar) if may_draft else None)

    def ended(self, features: AnswerFeatures, sequence: Sequence, *, is_whole: bool) -> None:
        """Counts and learns from an answer that has ended."""
        if features.grammar is not None:
            self.grammars.ended(features.grammar.state)
        if is_whole and features.speculation is not None:
            self._speculations.finished(sequence)

    def close(self) -> None:
        self.grammars.close()


def why_unsampled(features: AnswerFeatures, request: GenerateRequest) -> ServeError:
    """Returns why an answer got no token."""
    grammar = None if features.grammar is None else features.grammar.state
    if grammar is not None and grammar.failure is not None:
        return InvalidRequest(grammar.failure, field="grammar")
    if grammar is not None and allows_none(grammar, request.sampling):
        return InvalidRequest("allowed_token_ids has no token that the grammar permits", field="allowed_token_ids")
    return NonFiniteLogits("the model's numbers overflowed for this request: no token to draw")
