"""Chunks of one prompt as spans: each its own, until there are many."""

from __future__ import annotations

import time

from twostroke.tracing.span import OpenSpan

MOST_CHUNKS = 64
"""Spans of a prompt's chunks. The rest is one span: 64 hold ten thousand tokens in steps of a CPU's size, a quarter
million on a GPU."""


class Chunks:
    def __init__(self, span: OpenSpan) -> None:
        self._span = span
        self._rest: OpenSpan | None = None
        self._rest_begins = 0
        self._rest_end = 0
        self.count = 0
        self.tokens = 0
        self.ended_s: float | None = None
        """When the last one had been run."""

    def ran(self, start: int, end: int, seconds: float) -> None:
        """Tokens [start, end), in a step that has just ended."""
        self.ended_s = time.time()
        self.count += 1
        self.tokens += end - start
        if self.count <= MOST_CHUNKS:
            self._span.record("chunk", self.ended_s - seconds, self.ended_s, first_token=start, tokens=end - start)
            return
        if self._rest is None:
            self._rest = self._span.begin("chunk")
            self._rest.start_s, self._rest_begins = self.ended_s - seconds, start
        self._rest_end = end

    def end(self) -> None:
        if self._rest is not None:
            tokens = self._rest_end - self._rest_begins
            self._rest.set(first_token=self._rest_begins, tokens=tokens, chunks=self.count - MOST_CHUNKS)
            self._rest.end(at_s=self.ended_s)
