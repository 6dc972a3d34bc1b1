"""Whether one life of a worker is alive, suspect or dead, told from several signals. Pure: the clock is passed in.

ALIVE    heard lately: it gets new work
SUSPECT  silent for a while, or its event stream broke: what it has goes on, new work goes elsewhere
DEAD     silent for longer on every stream, or it refuses connections, or another life answers in its place: what it
         had goes on elsewhere. It may have been frozen or cut off only: once it is heard, it is a member again
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from twostroke.config import PatienceConfig

REFUSALS = 2
"""In a row, without a sign of life in between: the port is closed, so the process has ended."""


class Life(enum.StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


NEXT: dict[Life, frozenset[Life]] = {
    Life.ALIVE: frozenset({Life.SUSPECT, Life.DEAD}),
    Life.SUSPECT: frozenset({Life.ALIVE, Life.DEAD}),
    Life.DEAD: frozenset({Life.ALIVE}),
}


class Signal(enum.StrEnum):
    """What a worker is heard by, each over a connection of its own."""

    EVENTS = "events"
    """Batches of its event log, if only empty ones. What is placed goes by these."""
    TOKENS = "tokens"
    """Batches of tokens, if only empty ones."""


class Cause(enum.StrEnum):
    HEARD = "heard"
    SILENCE = "silence"
    BROKEN = "broken"
    REFUSED = "refused"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Change:
    before: Life
    life: Life
    cause: Cause
    signals: str
    """For how long each of them had been missing."""


class Liveness:
    """Of one life of one worker. Every method returns the change that it made, if any.

    All times are by the listener's waking clock (`Wakefulness`), on which its own lateness takes no time.
    """

    def __init__(self, patience: PatienceConfig, now_s: float) -> None:
        self.life = Life.SUSPECT
        """Until it is heard."""
        self._patience = patience
        self._begun_s = now_s
        self._heard_s: dict[Signal, float] = {}
        self._refusals = 0

    def hear(self, signal: Signal, now_s: float) -> Change | None:
        is_news = signal is Signal.EVENTS and self.life is not Life.ALIVE
        before = self._signals(now_s) if is_news else ""
        self._heard_s[signal] = now_s
        self._refusals = 0
        return self._move(Life.ALIVE, Cause.HEARD, before) if is_news else None

    def break_off(self, now_s: float) -> Change | None:
        """Its event stream broke."""
        if self.life is Life.ALIVE:
            return self._move(Life.SUSPECT, Cause.BROKEN, self._signals(now_s))
        return None

    def refuse(self, now_s: float) -> Change | None:
        """Nobody listens at its address."""
        self._refusals += 1
        if self._refusals >= REFUSALS and self.life is Life.SUSPECT:  # while events flow, it only takes nobody new
            return self._move(Life.DEAD, Cause.REFUSED, self._signals(now_s))
        return None

    def replace(self, now_s: float) -> Change | None:
        """Another life answers at its address."""
        if self.life is not Life.DEAD:
            return self._move(Life.DEAD, Cause.REPLACED, self._signals(now_s))
        return None

    def look(self, now_s: float) -> Change | None:
        """Call it every so often: silence makes itself not heard."""
        if self.life is Life.ALIVE and self.silence_s(Signal.EVENTS, now_s) >= self._patience.suspect_after_s:
            return self._move(Life.SUSPECT, Cause.SILENCE, self._signals(now_s))
        if not self._heard_s:  # it has nothing yet that could go elsewhere
            return None
        silence_s = min(self.silence_s(signal, now_s) for signal in Signal)
        if self.life is Life.SUSPECT and silence_s >= self._patience.dead_after_s:
            return self._move(Life.DEAD, Cause.SILENCE, self._signals(now_s))
        return None

    def silence_s(self, signal: Signal, now_s: float) -> float:
        return now_s - self._heard_s.get(signal, self._begun_s)

    def _move(self, life: Life, cause: Cause, signals: str) -> Change:
        assert life in NEXT[self.life], f"{self.life} -> {life}"
        before, self.life = self.life, life
        return Change(before, life, cause, signals)

    def _signals(self, now_s: float) -> str:
        missing = " ".join(f"{signal}_silent_s={now_s - heard_s:.2f}" for signal, heard_s in self._heard_s.items())
        return f"{missing or 'never_heard'} refusals={self._refusals}"


class Wakefulness:
    """The time that a process has been awake: while it was frozen, or kept from its event loop, none passed.

    `tick` is to be called every `tick_s`, and counts as that, however late it comes.
    """

    def __init__(self, tick_s: float, now_s: float) -> None:
        self.tick_s = tick_s
        self.awake_s = 0.0
        self.late_s = 0.0
        """All that was not counted."""
        self._ticked_s = now_s

    def tick(self, now_s: float) -> None:
        passed_s, self._ticked_s = now_s - self._ticked_s, now_s
        counted_s = min(passed_s, self.tick_s)
        self.awake_s += counted_s
        self.late_s += passed_s - counted_s
