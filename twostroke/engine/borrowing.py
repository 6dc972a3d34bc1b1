"""Whether borrowed cores make steps shorter, found out by trying both.

A kernel waits for its slowest thread. On a core that something else is using too, a borrowed thread is the slowest by
far, and steps take several times as long as without it. No count of idle cores says so beforehand.
"""

from __future__ import annotations

import statistics

from twostroke.scheduler.batch import Batch

TRIED_STEPS = 5
"""Steps of one kind that are timed on each side of a comparison."""
FIRST_STEPS, MOST_STEPS = 16, 2048
"""Between two comparisons; twice as many after each that changed nothing."""
WORTH = 0.85
"""The other way must take less than this share of the time on average to be preferred: stalls count in full."""
CONTEXT_TOKENS = 2048
"""Steps whose contexts differ by less are alike."""

Kind = tuple[int, int, int]


def kind_of(batch: Batch) -> Kind:
    """Steps of one kind take about the same time."""
    streams = len(batch.samples)
    return streams, len(batch.tokens) - streams, int(batch.context_lens.sum()) // CONTEXT_TOKENS


class Borrowing:
    def __init__(self, *, begins: bool = False) -> None:
        self.wanted = begins
        """Whether the next step should borrow what it can."""
        self._seconds: dict[bool, dict[Kind, list[float]]] = {True: {}, False: {}}
        """Seconds of the last few steps of each kind, with and without borrowed cores."""
        self._is_trial = False
        self._steps = 0
        self._between_steps = FIRST_STEPS

    def observe(self, kind: Kind, seconds: float, borrowed: int) -> None:
        """A step took that long on that many borrowed cores."""
        if self.wanted and not borrowed:
            return  # nothing was to be had: that says nothing
        times = self._seconds[self.wanted].setdefault(kind, [])
        times.append(seconds)
        del times[:-TRIED_STEPS]
        self._steps += 1
        if self._is_trial:
            if len(times) == TRIED_STEPS or self._steps >= 4 * TRIED_STEPS:
                self._end_trial(kind)
        elif self._steps >= self._between_steps and len(times) == TRIED_STEPS:
            self._begin_trial()

    def _begin_trial(self) -> None:
        self.wanted = not self.wanted
        self._seconds[self.wanted].clear()
        self._is_trial, self._steps = True, 0

    def _end_trial(self, kind: Kind) -> None:
        tried, usual = (self._seconds[way].get(kind, ()) for way in (self.wanted, not self.wanted))
        is_better = len(tried) == len(usual) == TRIED_STEPS and statistics.fmean(tried) < WORTH * statistics.fmean(
            usual
        )
        if is_better:
            self._between_steps = FIRST_STEPS
        else:
            self.wanted = not self.wanted
            self._between_steps = min(MOST_STEPS, 2 * self._between_steps)
        for times in self._seconds.values():
            times.clear()
        self._is_trial, self._steps = False, 0
