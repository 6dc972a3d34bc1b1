"""Speculation of a decode worker's requests: drafters by their names, what they learn from, and metrics of it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from twostroke.base.errors import InvalidRequest
from twostroke.config import DRAFT_MODEL, DRAFTER_NAMES, SPECULATE_AUTO, SPECULATE_OFF, ScheduleConfig
from twostroke.engine.determinism import Determinism
from twostroke.grammar.state import GrammarState
from twostroke.request import Attempt, GenerateRequest
from twostroke.scheduler.sequence import Sequence
from twostroke.speculation.acceptance import Acceptance
from twostroke.speculation.answers import FinishedAnswers
from twostroke.speculation.drafters import AnswerFacts, drafters_of
from twostroke.speculation.speculation import Outcome, Speculation

POSITIONS = (1, 2, 3, 4, 8, 16, 32)
"""The last place of a draft in each class of places."""


class SpeculationMetrics:
    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"twostroke_speculation_{name}_total", text, ("role", "drafter", *labels), registry=registry)

        self._role = role
        self._drafted = counter(
            "drafted_tokens", "Drafted tokens that were run, by their place in the draft, up to this one.", "position"
        )
        self._kept = counter("kept_tokens", "Drafted tokens that the sampler drew too.", "position")
        self._saved_s = counter("saved_seconds", "Time of steps that kept tokens have spared, by the fitted cost.")
        self._draft_s = counter("draft_seconds", "Time that a draft model computed.")
        self._spent_s = counter("spent_seconds", "Time that drafted tokens have made steps longer, by the fitted cost.")

    def ran(self, drafter: str, outcome: Outcome) -> None:
        self._saved_s.labels(self._role, drafter).inc(outcome.saved_s)
        self._spent_s.labels(self._role, drafter).inc(outcome.spent_s)
        self._draft_s.labels(self._role, drafter).inc(outcome.draft_s)
        before = 0
        for position in POSITIONS:
            for counted, counter in ((outcome.run, self._drafted), (outcome.kept, self._kept)):
                if counted > before:
                    counter.labels(self._role, drafter, str(position)).inc(min(counted, position) - before)
            before = position


class Speculations:
    def __init__(self, schedule: ScheduleConfig, determinism: Determinism, metrics: SpeculationMetrics) -> None:
        self.names = _names(schedule, determinism)
        """Drafters that may propose here; none where nothing is drafted."""
        self._has_draft_model = schedule.draft_model is not None
        self._metrics = metrics
        self._acceptance = Acceptance()
        self._answers = FinishedAnswers()

    def check(self, attempt: Attempt) -> None:
        """Raises InvalidRequest where a request asks for a draft model, and there is none.

        An answer that goes on here was accepted by a worker that has one: it goes on without.
        """
        if attempt.request.speculation == DRAFT_MODEL and not self._has_draft_model and not attempt.emitted:
            others = ", ".join(name for name in (SPECULATE_AUTO, SPECULATE_OFF, *DRAFTER_NAMES) if name != DRAFT_MODEL)
            raise InvalidRequest(
                f"speculation: no draft model is served here; leave it away, or say one of {others}",
                field="speculation",
            )

    def of(self, request: GenerateRequest, grammar: GrammarState | None = None) -> Speculation | None:
        """Returns who proposes the answer's tokens; None: nobody.

        What its grammar forces is proposed where each token has to be drawn; elsewhere it becomes known undrawn.
        """
        wanted = request.speculation or SPECULATE_AUTO
        names = self.names if wanted == SPECULATE_AUTO else tuple([name for name in self.names if name == wanted])
        if not names:
            return None
        if DRAFT_MODEL in names:
            self._acceptance.fade(DRAFT_MODEL)
        forced_run = grammar.forced_run if grammar is not None and request.sampling.draws_forced else None
        drafters = drafters_of(names, AnswerFacts(self._answers, request.salt, forced_run))
        return Speculation(drafters, self._acceptance, self._metrics.ran)

    def finished(self, sequence: Sequence) -> None:
        """Learns from a whole answer for which drafters may propose."""
        if "suffix" in self.names:
            self._answers.add(sequence.salt, sequence.known[sequence.prompt_tokens :])


def _names(schedule: ScheduleConfig, determinism: Determinism) -> tuple[str, ...]:
    if schedule.speculate == SPECULATE_OFF:
        return ()
    if schedule.speculate != SPECULATE_AUTO:
        return (schedule.speculate,)
    if not determinism.holds:
        return ()
    return tuple([name for name in DRAFTER_NAMES if name != DRAFT_MODEL or schedule.draft_model is not None])
