"""Life signs on standard error."""

from __future__ import annotations

import io

from tools.bench.load import PlannedRequest
from tools.bench.measure import Answer, Failure, Record
from tools.bench.session import progress

PLANNED = PlannedRequest(0, (), 2, None)
DONE = Record(PLANNED, None, Answer(0, 1, [0.5, 1], 2, "usage", 1, 0, None))
FAILED = Record(PLANNED, None, Answer(0, 1, [0.5], 1, "events", None, None, Failure("timeout", "")))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_line_appears_only_every_few_seconds() -> None:
    stream = io.StringIO()
    readings = iter([0.0, 1.0, 6.0, 6.0, 7.0])
    with progress(3, lambda: next(readings), stream) as on_record:
        for record in (DONE, FAILED, DONE):
            on_record(record)
    assert stream.getvalue() == "bench: 2/3 requests, 2 tokens, 1 failed\n"


def test_a_terminal_shows_a_bar_with_counts() -> None:
    stream = Terminal()
    with progress(3, lambda: 0.0, stream) as on_record:
        for record in (DONE, FAILED, DONE):
            on_record(record)
    assert "4 tokens, 1 failed" in stream.getvalue()
    assert "3/3" in stream.getvalue()
