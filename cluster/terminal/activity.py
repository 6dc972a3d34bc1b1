"""Shows what is in progress and since when: a moving line on a terminal, plain lines elsewhere."""

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
"""Seconds after which an unchanged activity is printed again where there is no terminal."""
FRAMES_PER_S = 8
NAMES = 4
"""Processes named in one line; beyond that their number is printed."""


@dataclass(frozen=True, slots=True)
class Activity:
    name: str
    """Name of the process."""
    doing: str
    since_s: float
    """Start of the activity on the clock, in seconds."""


def described(activities: Sequence[Activity], now_s: float) -> str:
    """Describes activities. Processes that do the same are listed together, with the longest duration among them."""
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
    """Returns whether the line may be drawn. A background job would draw over what its user types."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True
