"""What is going on right now, and since when: one moving line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

REPEAT_S = 15.0
"""Longest silence without a terminal: whoever reads a log sees that something still goes on, and what."""
FRAMES_PER_S = 8
NAMES = 4
"""That are spelt out; of more processes that do the same the number is told."""


@dataclass(frozen=True, slots=True)
class Activity:
    name: str
    """Of a process."""
    doing: str
    since_s: float
    """Of the clock."""


def described(activities: Sequence[Activity], now_s: float) -> str:
    """Processes that do the same stand together, with the time of the one that has been at it for longest."""
    parts = []
    for doing in dict.fromkeys(activity.doing for activity in activities):
        same = [activity for activity in activities if activity.doing == doing]
        names = ", ".join(activity.name for activity in same[:NAMES])
        more = f" and {len(same) - NAMES} more" if len(same) > NAMES else ""
        parts.append(f"{names}{more} {doing}, {now_s - min(each.since_s for each in same):.0f} s")
    return "; ".join(parts)


class ActivityLine:
    def __init__(self, console: Console, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        """`say` prints a line that stays."""
        self._console = console
        self._say = say
        self._clock = clock
        self._stage = ""
        self._began_s = self._said_s = clock()
        self._activities: tuple[Activity, ...] = ()
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def begin(self, stage: str) -> None:
        self.end()
        self._stage, self._activities = stage, ()
        self._began_s = self._said_s = self._clock()
        if self._console.is_interactive and _is_in_foreground():
            self._live = Live(
                get_renderable=self._frame,
                console=self._console,
                refresh_per_second=FRAMES_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def detail(self, activities: Sequence[Activity]) -> None:
        has_changed = [(each.name, each.doing) for each in activities] != [
            (each.name, each.doing) for each in self._activities
        ]
        self._activities = tuple(activities)
        if self._live is not None or not self._stage or not activities:
            return
        if has_changed or self._clock() - self._said_s > REPEAT_S:
            self._said_s = self._clock()
            self._say(self._text())

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._stage = ""

    def _text(self) -> str:
        now_s = self._clock()
        if not self._activities:
            return f"{self._stage}, {now_s - self._began_s:.0f} s"
        return f"{self._stage}: {described(self._activities, now_s)}"

    def _frame(self) -> Spinner:
        self._spinner.update(text=Text(self._text()))
        return self._spinner


def _is_in_foreground() -> bool:
    """A job in the background would draw over what its user types."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True
