"""One run against the promise: which requests met it, and when the verdict is certain. Pure."""

from __future__ import annotations

import math
from itertools import pairwise

from tools.bench.goodput.options import Promise
from tools.bench.measure import Answer, percentile


class Verdict:
    """Counts as requests end. A run passes or fails as soon as the rest of it cannot change that."""

    def __init__(self, promise: Promise, requests: int) -> None:
        self._promise = promise
        self._requests = requests
        self._needed = math.ceil(promise.share * requests - 1e-9)
        self.met = 0
        self.missed_ttft = 0
        self.missed_inter_token = 0
        self.failed = 0

    def add(self, answer: Answer) -> None:
        """A request that misses both counts for its first token."""
        if answer.failure is not None or not answer.event_times_s:
            self.failed += 1
        elif answer.event_times_s[0] - answer.sent_at_s > self._promise.ttft_s:
            self.missed_ttft += 1
        elif own_inter_token_p99_s(answer) > self._promise.inter_token_s:
            self.missed_inter_token += 1
        else:
            self.met += 1

    @property
    def passed(self) -> bool | None:
        """None while both are possible."""
        missed = self.failed + self.missed_ttft + self.missed_inter_token
        if self.met >= self._needed:
            return True
        return False if missed > self._requests - self._needed else None


def own_inter_token_p99_s(answer: Answer) -> float:
    """0 for a single event: there is nothing to wait for."""
    gaps = sorted(later - earlier for earlier, later in pairwise(answer.event_times_s))
    return percentile(gaps, 99) if gaps else 0.0
