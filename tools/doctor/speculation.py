"""Reads what speculation has done on one worker, by drafter, and whether it was worth its time."""

from __future__ import annotations

from dataclasses import dataclass

from tools.doctor.facts import Samples
from twostroke.config import Role

PREFIX = "twostroke_speculation"
DETERMINISTIC = "twostroke_deterministic"
LEAST_SPENT_S = 0.01
"""A drafter without drafted tokens is shown only if it has spent this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFacts:
    """What became of one drafter's tokens since the worker began."""

    drafter: str
    drafted: int
    kept: int
    saved_s: float
    """Seconds of steps that kept tokens have spared."""
    spent_s: float
    """Seconds that drafted tokens have made steps longer, and that a draft model computed."""

    @property
    def is_worth_it(self) -> bool:
        return self.saved_s > self.spent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFacts:
    drafters: tuple[DrafterFacts, ...] = ()
    """The drafters that have drafted or computed."""
    is_deterministic: bool = True
    """Whether the bits of its logits do not depend on the rows of a step. Otherwise `--speculate auto` does nothing."""

    def lines(self, worker: str) -> list[str]:
        """Returns what to print of a decode worker: one line for each drafter, or why there is none."""
        if not self.drafters:
            why = "" if self.is_deterministic else ": its logits depend on the rows of a step, unless --deterministic"
            return [f"{worker}: speculation has drafted nothing{why}"]
        return [_line(worker, each) for each in self.drafters]


def speculation_of(samples: Samples, role: str) -> SpeculationFacts | None:
    """Returns None where a worker drafts for no request: with the role of prefill, or where its page is empty."""
    return speculation_in(samples) if samples and role == Role.DECODE.value else None


def speculation_in(samples: Samples) -> SpeculationFacts:
    """Reads a decode worker's metrics page; empty facts where nothing is counted."""
    names = sorted({labels["drafter"] for labels, _ in samples.get(f"{PREFIX}_saved_seconds_total", ())})
    drafters = [_drafter(samples, name) for name in names]
    return SpeculationFacts(
        drafters=tuple([each for each in drafters if each.drafted or each.spent_s >= LEAST_SPENT_S]),
        is_deterministic=any(value for _, value in samples.get(DETERMINISTIC, (({}, 1.0),))),
    )


def _line(worker: str, facts: DrafterFacts) -> str:
    gained_s = facts.saved_s - facts.spent_s
    worth = "worth it" if facts.is_worth_it else "not worth it"
    return (
        f"{worker}: {facts.drafter} drafted {facts.drafted} tokens, {facts.kept} kept; saved {facts.saved_s:.2f} s, "
        f"spent {facts.spent_s:.2f} s: {worth} ({gained_s:+.2f} s)"
    )


def _drafter(samples: Samples, drafter: str) -> DrafterFacts:
    def total(name: str) -> float:
        found = samples.get(f"{PREFIX}_{name}_total", ())
        return sum(value for labels, value in found if labels.get("drafter") == drafter)

    return DrafterFacts(
        drafter=drafter,
        drafted=int(total("drafted_tokens")),
        kept=int(total("kept_tokens")),
        saved_s=total("saved_seconds"),
        spent_s=total("spent_seconds") + total("draft_seconds"),
    )
