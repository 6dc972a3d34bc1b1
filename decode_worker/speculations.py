"""Speculation as a branch of a decode worker: the drafters of answers, what they learn from, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf

from prometheus_client import CollectorRegistry, Counter

from twostroke.base.errors import InvalidRequest
from twostroke.config import DRAFT_MODEL, DRAFTER_NAMES, SPECULATE_AUTO, SPECULATE_OFF, ScheduleConfig
from twostroke.engine.determinism import Determinism
from twostroke.request import Attempt, GenerateRequest
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.constraints.drafting import Drafting
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import SchedulerLimits
from twostroke.speculation.answers import FinishedAnswers
from twostroke.speculation.drafters import AnswerFacts, ForcedRun, drafters_of
from twostroke.speculation.speculation import Acceptance, Outcome, Speculation
from twostroke.worker.answers import AnswerFeature
from twostroke.worker.branches import Branch, BranchHost

POSITIONS = (1, 2, 3, 4, 8, 16, 32)
"""Last position of each bucket of positions in a draft."""


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


class DraftedAnswer(AnswerFeature):
    """An answer whose next tokens are proposed."""

    def __init__(self, speculation: Speculation, learn: Callable[[Sequence], None]) -> None:
        self.proposer = self._speculation = speculation
        self._learn = learn

    @property
    def facts(self) -> dict[str, float]:
        """Returns drafted and kept tokens, also by drafter, and the time that they have saved."""
        all_drafts, facts = self._speculation.outcome, dict[str, float]()
        if not all_drafts.run:
            return facts
        for name, each in self._speculation.outcomes.items():
            if each.run:
                facts |= {f"drafted.{name}": each.run, f"kept.{name}": each.kept}
        saved_s = all_drafts.saved_s - all_drafts.spent_s - all_drafts.draft_s
        return facts | {
            "drafted_tokens": all_drafts.run, "kept_tokens": all_drafts.kept, "speculation_saved_s": saved_s,
        }  # fmt: skip

    def add_to_last(self, entry: worker_pb2.TokenEntry) -> None:
        for drafter, outcome in self._speculation.outcomes.items():
            entry.drafts[drafter].CopyFrom(worker_pb2.DraftCounts(drafted=outcome.run, kept=outcome.kept))

    def ended(self, sequence: Sequence, *, is_whole: bool) -> None:
        if is_whole:
            self._learn(sequence)


class DraftedAnswers:
    """Lets drafters propose the tokens of answers, and learns from answers that have ended."""

    field = "speculation"

    def __init__(self, schedule: ScheduleConfig, determinism: Determinism, metrics: SpeculationMetrics) -> None:
        self.names = _names(schedule, determinism)
        """Names of the drafters that may propose here; empty if nothing is drafted."""
        self.is_default = bool(self.names)
        self._has_draft_model = schedule.draft_model is not None
        self._metrics = metrics
        self._acceptance = Acceptance()
        self._answers = FinishedAnswers()

    async def feature_of(self, attempt: Attempt, others: ListOf[AnswerFeature]) -> DraftedAnswer | None:
        self._check(attempt)
        speculation = self.of(attempt.request, next((each.forced_run for each in others if each.forced_run), None))
        return None if speculation is None else DraftedAnswer(speculation, self._finished)

    def of(self, request: GenerateRequest, forced_run: ForcedRun | None = None) -> Speculation | None:
        """Returns the speculation that proposes the answer's tokens, if any. `forced_run` finds certain next tokens."""
        wanted = request.speculation or SPECULATE_AUTO
        names = self.names if wanted == SPECULATE_AUTO else tuple([name for name in self.names if name == wanted])
        if not names:
            return None
        if DRAFT_MODEL in names:
            self._acceptance.fade(DRAFT_MODEL)
        drafters = drafters_of(names, AnswerFacts(self._answers, request.salt, forced_run))
        return Speculation(drafters, self._acceptance, self._metrics.ran)

    def _check(self, attempt: Attempt) -> None:
        """Refuses a request for a draft model if there is none here. Raises InvalidRequest.

        An answer that continues here was accepted by a worker that has a draft model. It continues without one.
        """
        if attempt.request.speculation == DRAFT_MODEL and not self._has_draft_model and not attempt.emitted:
            others = ", ".join(name for name in (SPECULATE_AUTO, SPECULATE_OFF, *DRAFTER_NAMES) if name != DRAFT_MODEL)
            raise InvalidRequest(
                f"speculation: no draft model is served here; leave it away, or say one of {others}",
                field="speculation",
            )

    def _finished(self, sequence: Sequence) -> None:
        """Learns from a complete answer, if a drafter uses that."""
        if "suffix" in self.names:
            self._answers.add(sequence.salt, sequence.known[sequence.prompt_tokens :])


class Speculations(Branch):
    def __init__(self, host: BranchHost) -> None:
        super().__init__(host)
        metrics = SpeculationMetrics(host.metrics.registry, host.config.role.value)
        self.answers = DraftedAnswers(host.config.schedule, host.determinism, metrics)

    def extension(self, limits: SchedulerLimits) -> Drafting | None:
        return None if self.host.config.schedule.speculate == SPECULATE_OFF else Drafting(limits)


def _names(schedule: ScheduleConfig, determinism: Determinism) -> tuple[str, ...]:
    if schedule.speculate == SPECULATE_OFF:
        return ()
    if schedule.speculate != SPECULATE_AUTO:
        return (schedule.speculate,)
    if not determinism.holds:
        return ()
    return tuple([name for name in DRAFTER_NAMES if name != DRAFT_MODEL or schedule.draft_model is not None])
