"""Instants of a request's life, by which its time to first token is taken apart."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping


class Instant(enum.StrEnum):
    RECEIVED = "received"
    """The router has the whole request."""
    ROUTED = "routed"
    """A decode worker and a page source are chosen."""
    OPENED = "opened"
    """The decode worker has the request."""
    ADMITTED = "admitted"
    """Pages for the prompt plus one are claimed."""
    FIRST_PAGE = "first_page"
    LAST_PAGE = "last_page"
    """The last page of the pull is verified and committed."""
    FIRST_TOKEN = "first_token"
    DONE = "done"


class Lifetime:
    """When each instant was first reached, in seconds of one process's wall clock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._at_s: dict[Instant, float] = {}

    def mark(self, instant: Instant) -> None:
        self._at_s.setdefault(instant, self._clock())

    def merge(self, at_s: Mapping[str, float]) -> None:
        """Takes over instants that another process marked."""
        for name, when in at_s.items():
            self._at_s.setdefault(Instant(name), when)

    def at(self, instant: Instant) -> float | None:
        return self._at_s.get(instant)

    def between(self, start: Instant, end: Instant) -> float | None:
        """Returns seconds from `start` to `end`, or None where one was not reached."""
        if start not in self._at_s or end not in self._at_s:
            return None
        return self._at_s[end] - self._at_s[start]

    def as_dict(self) -> dict[str, float]:
        """Returns the seconds of each instant, in the order in which they happened."""
        return {instant.value: when for instant, when in sorted(self._at_s.items(), key=lambda entry: entry[1])}
