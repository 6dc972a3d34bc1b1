"""How far a run is, on standard error: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tools.bench.client import Clock
from tools.bench.drive import OnRecord
from tools.bench.measure import Record

LINE_EVERY_S = 5.0
"""Without a terminal: often enough to see life in a log, too rare to fill it."""


class Tally:
    """Running counts over all records so far."""

    def __init__(self) -> None:
        self.ended = 0
        self.failed = 0
        self.output_tokens = 0

    def add(self, record: Record) -> None:
        self.ended += 1
        if record.answer.failure is not None:
            self.failed += 1
        else:
            self.output_tokens += record.answer.output_tokens

    def __str__(self) -> str:
        return f"{self.output_tokens} tokens, {self.failed} failed"


@contextlib.contextmanager
def progress(total: int, clock: Clock, stream: TextIO = sys.stderr) -> Iterator[OnRecord]:
    if stream.isatty():
        with _bar(total, Console(file=stream)) as on_record:
            yield on_record
    else:
        yield _lines(total, clock, stream)


@contextlib.contextmanager
def _bar(total: int, console: Console) -> Iterator[OnRecord]:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, refresh_per_second=4, transient=True
    ) as bar:
        tally = Tally()
        task = bar.add_task(str(tally), total=total)

        def on_record(record: Record) -> None:
            tally.add(record)
            bar.update(task, completed=tally.ended, description=str(tally))

        yield on_record


def _lines(total: int, clock: Clock, stream: TextIO) -> OnRecord:
    tally = Tally()
    next_line_s = clock() + LINE_EVERY_S

    def on_record(record: Record) -> None:
        nonlocal next_line_s
        tally.add(record)
        if clock() >= next_line_s:
            next_line_s = clock() + LINE_EVERY_S
            print(f"bench: {tally.ended}/{total} requests, {tally}", file=stream, flush=True)

    return on_record
