"""What each file of tests takes of the processor, noted in the results that pytest writes with `--junitxml`.

The last test of each file has four properties: `file`, `processor_s`, `clock_s` and `loop_s`. `processor_s` is the
time on the processor of this process of pytest and of every process below it, ended ones included, since the last test
of the file before. `clock_s` is the time by the clock since the file's first test began. `loop_s` is what a loop that
never changes takes of the processor at that moment; `tests.durations` divides by it. What a process takes after its
parent has ended, as Ray's own processes may, is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

TURNS = 60_000
"""Turns of the loop: some milliseconds."""


class Meter:
    """Tells what this process and those below it have taken of the processor since it was asked last."""

    def __init__(self) -> None:
        self._taken_s = _taken_so_far_s()

    def since_last_s(self) -> float:
        before_s, self._taken_s = self._taken_s, _taken_so_far_s()
        return max(0.0, self._taken_s - before_s)


class FileTimes:
    """The plugin of pytest. What is loaded before the first test belongs to no file."""

    def __init__(self) -> None:
        self._meter: Meter | None = None
        self._begun_s: float | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        if self._meter is None:
            self._meter = Meter()
        if self._begun_s is None:
            self._begun_s = time.monotonic()
        yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        yield
        if self._meter is None or self._begun_s is None:
            return
        if nextitem is None or nextitem.path != item.path:
            item.user_properties += [
                ("file", item.nodeid.partition("::")[0]),
                ("processor_s", f"{self._meter.since_last_s():.2f}"),
                ("clock_s", f"{time.monotonic() - self._begun_s:.2f}"),
                ("loop_s", f"{loop_s():.5f}"),
            ]
            self._begun_s = None


def loop_s() -> float:
    """Returns what a loop that never changes takes of the processor now."""
    begun_s = time.thread_time()
    number = 1
    for turn in range(TURNS):
        number = (number * 31 + turn) % 1_000_003
    return time.thread_time() - begun_s


def _taken_so_far_s() -> float:
    taken_s = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        taken_s += times.user + times.system + times.children_user + times.children_system
    return taken_s
