"""Finds out whether borrowed cores make steps shorter, by trying steps with and without them.

A kernel waits for its slowest thread. If another program uses a borrowed core, the thread there is by far the slowest.
Steps then take several times as long as without it. The number of idle cores does not predict this.

Steps with prompts and steps with streams only are judged separately. The first are bound by arithmetic, the second by
reading the weights, and one core may read nearly as fast as two.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from twostroke.scheduler.batch import Batch

TRIED_STEPS = 5
"""Number of steps of one kind that are timed on each side of a comparison."""
HOPELESS_STEPS = 2
"""A trial ends after this many steps of a kind if even the shortest takes longer than the longest usual step."""
HOPELESS = 1.5
"""A trial ends at once if its first step of a kind takes this many times as long as the longest usual one. A prompt
that half of the cores compute in a trial has a late first token."""
FIRST_S, FIRST_OF_PROMPTS_S, MOST_S = 0.16, 1.0, 60.0
"""Seconds of steps between two comparisons: at first, at first for prompts, and at most.

The pause doubles after each comparison that changed nothing. Prompts wait longer for their first comparison, since they
begin with what is usually right: borrowing.
"""
TRIALS_APART = 20
"""After a trial that changed nothing, the next one waits at least this many times as long as the trial took."""
WORTH = 0.85
"""The other way is preferred when its mean time is below this share of the usual one. Stalls count in full."""
CONTEXT_TOKENS = 2048
"""Steps are alike when their contexts differ by less than this many tokens."""
PROMPT_TOKENS = 16
"""A step with at least this many prompt tokens is judged with prompts. Fewer, such as a prompt's tail, make no step
longer."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """What steps are compared by: those of one kind take about the same time."""

    streams: int
    prompt_tokens: int
    contexts: int
    """Tokens attended to, in units of CONTEXT_TOKENS."""

    @classmethod
    def of(cls, batch: Batch) -> StepKind:
        streams = len(batch.samples)
        return cls(streams, len(batch.tokens) - streams, int(batch.context_lens.sum()) // CONTEXT_TOKENS)


class Borrowing:
    def __init__(self) -> None:
        self.prompts = Trials(wanted=True, first_s=FIRST_OF_PROMPTS_S)
        self.streams = Trials(wanted=False, first_s=FIRST_S)

    def trials_of(self, kind: StepKind) -> Trials:
        """Returns the trials of steps of this kind."""
        return self.prompts if kind.prompt_tokens >= PROMPT_TOKENS else self.streams


class Trials:
    """Steps with and without borrowed cores, in turns that grow rarer while nothing changes."""

    def __init__(self, *, wanted: bool, first_s: float) -> None:
        """`first_s`: seconds of steps before the first comparison, and before the next one whenever `wanted` was
        changed."""
        self.wanted = wanted
        """Whether the next step should borrow what it can."""
        self._seconds: dict[bool, dict[StepKind, list[float]]] = {True: {}, False: {}}
        """Seconds of the last few steps of each kind, with and without borrowed cores."""
        self._is_trial = False
        self._steps = 0
        self._spent_s = 0.0
        self._first_s = self._between_s = first_s

    def observe(self, kind: StepKind, seconds: float, borrowed: int) -> None:
        """Notes how long a step took, and on how many borrowed cores."""
        if self.wanted and not borrowed:
            return  # no core could be borrowed, so this step shows nothing
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
        """Returns how many steps of a trial have usual steps of the same kind to compare with, and the summed seconds
        of both.

        A stream may bring several tokens, so there are many kinds of steps: those of all kinds count together.
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
        """Ends the trial: `count` of its steps took `tried_s`, where usual ones took `usual_s`."""
        if count >= TRIED_STEPS and tried_s < WORTH * usual_s:
            self._between_s = self._first_s
        else:
            self.wanted = not self.wanted
            longer = 2 if count >= TRIED_STEPS else 1  # too few steps to compare do not delay the next trial
            self._between_s = min(MOST_S, max(longer * self._between_s, TRIALS_APART * self._spent_s))
        for times in self._seconds.values():
            times.clear()
        self._is_trial, self._steps, self._spent_s = False, 0, 0.0
