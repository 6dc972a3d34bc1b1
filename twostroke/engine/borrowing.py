"""Whether borrowed cores make steps shorter, found out by trying both.

A kernel waits for its slowest thread. On a core that something else is using too, a borrowed thread is the slowest by
far, and steps take several times as long as without it. No count of idle cores says so beforehand.

Steps of prompts and steps of streams alone are judged apart: the first compute, the second read the weights, and one
core may read nearly as fast as two.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from twostroke.scheduler.batch import Batch

TRIED_STEPS = 5
"""Steps of one kind that are timed on each side of a comparison."""
HOPELESS_STEPS = 2
"""Steps of a trial that end it if each takes longer than usual."""
HOPELESS = 1.5
"""Times as long as the longest usual step that one step of a trial takes to end it at once: a prompt that is computed
by half the cores in a trial has a late first token."""
FIRST_S, FIRST_OF_PROMPTS_S, MOST_S = 0.16, 1.0, 60.0
"""Seconds of steps between two comparisons, at first and at most; twice as many after each that changed nothing. The
first comparison of prompts comes later: they begin in the way that is usually right."""
TRIALS_APART = 20
"""Times as long as a trial that changed nothing took, before the next one."""
WORTH = 0.85
"""The other way must take less than this share of the time on average to be preferred: stalls count in full."""
CONTEXT_TOKENS = 2048
"""Steps whose contexts differ by less are alike."""
PROMPT_TOKENS = 16
"""A step with as many tokens of prompts is one of prompts; the tail of a prompt makes no step longer."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """Steps of one kind take about the same time."""

    streams: int
    prompt_tokens: int
    contexts: int
    """Tokens attended to, in units of CONTEXT_TOKENS."""

    @classmethod
    def of(cls, batch: Batch) -> StepKind:
        streams = len(batch.samples)
        return cls(streams, len(batch.tokens) - streams, int(batch.context_lens.sum()) // CONTEXT_TOKENS)

    @property
    def is_of_prompts(self) -> bool:
        return self.prompt_tokens >= PROMPT_TOKENS


class Borrowing:
    def __init__(self) -> None:
        self._prompts = Trials(wanted=True, first_s=FIRST_OF_PROMPTS_S)
        self._streams = Trials(wanted=False, first_s=FIRST_S)

    def wants(self, kind: StepKind) -> bool:
        """Return whether the next step, of this kind, should borrow what it can."""
        return self._trials_of(kind).wanted

    @property
    def wants_for_prompts(self) -> bool:
        return self._prompts.wanted

    def observe(self, kind: StepKind, seconds: float, borrowed: int) -> None:
        """A step took that long on that many borrowed cores."""
        self._trials_of(kind).observe(kind, seconds, borrowed)

    def _trials_of(self, kind: StepKind) -> Trials:
        return self._prompts if kind.is_of_prompts else self._streams


class Trials:
    """Steps with and without borrowed cores, in turns that grow rarer while nothing changes."""

    def __init__(self, *, wanted: bool, first_s: float) -> None:
        """`first_s`: seconds of steps before the first comparison, and before the next after one that changed it."""
        self.wanted = wanted
        """Whether the next step should borrow what it can."""
        self._seconds: dict[bool, dict[StepKind, list[float]]] = {True: {}, False: {}}
        """Seconds of the last few steps of each kind, with and without borrowed cores."""
        self._is_trial = False
        self._steps = 0
        self._spent_s = 0.0
        self._first_s = self._between_s = first_s

    def observe(self, kind: StepKind, seconds: float, borrowed: int) -> None:
        """A step took that long on that many borrowed cores."""
        if self.wanted and not borrowed:
            return  # nothing was to be had: that says nothing
        times = self._seconds[self.wanted].setdefault(kind, [])
        times.append(seconds)
        del times[:-TRIED_STEPS]
        self._steps += 1
        self._spent_s += seconds
        if self._is_trial:
            count, tried_s, usual_s = self._compared()
            if count >= TRIED_STEPS or self._steps >= (4 * TRIED_STEPS if count else TRIED_STEPS):
                self._end_trial(count, tried_s, usual_s)
            elif self._is_hopeless(kind):
                self._end_trial(TRIED_STEPS, math.inf, 0.0)
        elif self._spent_s >= self._between_s and len(times) == TRIED_STEPS:
            self._begin_trial()

    def _is_hopeless(self, kind: StepKind) -> bool:
        tried, usual = self._tried_and_usual(kind)
        if len(usual) < TRIED_STEPS:
            return False
        return min(tried) > max(usual) * (HOPELESS if len(tried) < HOPELESS_STEPS else 1.0)

    def _begin_trial(self) -> None:
        self.wanted = not self.wanted
        self._seconds[self.wanted].clear()
        self._is_trial, self._steps, self._spent_s = True, 0, 0.0

    def _tried_and_usual(self, kind: StepKind) -> tuple[list[float], list[float]]:
        return self._seconds[self.wanted].get(kind, []), self._seconds[not self.wanted].get(kind, [])

    def _compared(self) -> tuple[int, float, float]:
        """Return how many steps of a trial have usual ones of their kind beside them, and the mean seconds of both.

        Drafted tokens make steps of many kinds: those of all kinds count together.
        """
        count, tried_s, usual_s = 0, 0.0, 0.0
        for kind, tried in self._seconds[self.wanted].items():
            usual = self._seconds[not self.wanted].get(kind, [])
            pairs = min(len(tried), len(usual))
            if pairs:
                count += pairs
                tried_s += pairs * statistics.fmean(tried)
                usual_s += pairs * statistics.fmean(usual)
        return count, tried_s, usual_s

    def _end_trial(self, count: int, tried_s: float, usual_s: float) -> None:
        """End it by `count` comparisons of the seconds of its steps with those of usual ones."""
        if count >= TRIED_STEPS and tried_s < WORTH * usual_s:
            self._between_s = self._first_s
        else:
            self.wanted = not self.wanted
            longer = 2 if count >= TRIED_STEPS else 1  # a trial that told nothing does not make the next one rarer
            self._between_s = min(MOST_S, max(longer * self._between_s, TRIALS_APART * self._spent_s))
        for times in self._seconds.values():
            times.clear()
        self._is_trial, self._steps, self._spent_s = False, 0, 0.0
