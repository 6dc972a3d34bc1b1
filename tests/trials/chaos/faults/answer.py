"""What a client got, and whether it is what it would have got of a healthy cluster. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

ROUNDING = 1e-3
"""Largest difference of a logprob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One message of a stream."""

    index: int = 0
    """Number of the choice."""
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Those of the prompt's tokens come before those of the answer's, where they are wanted."""
    finish: str = ""
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and of the answer."""
    resume_token: str = ""


@dataclass(frozen=True, slots=True)
class Silence:
    at_s: float
    router: str


@dataclass(slots=True)
class Choice:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""


@dataclass(slots=True)
class Transcript:
    """Grows message by message; times are of the wall clock, as those of a fault are."""

    name: str
    began_s: float
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    arrivals_s: list[float] = field(default_factory=list)
    """Arrival times of messages that say something."""
    silences: list[Silence] = field(default_factory=list)
    """When its client gave a silent router up."""
    turns: list[str] = field(default_factory=list)
    """Why its client went to another router, each time."""
    failure: str | None = None
    """Why its client gave up altogether."""
    has_left: bool = False

    def take(self, piece: Piece, now_s: float) -> None:
        if piece.tokens or piece.text or piece.finish:
            choice = self.choices.setdefault(piece.index, Choice())
            if choice.finish:
                self.failure = f"choice {piece.index} goes on after its end"
            choice.text += piece.text
            choice.tokens += piece.tokens
            choice.logprobs += piece.logprobs
            choice.finish = piece.finish or choice.finish
            self.arrivals_s.append(now_s)
        self.usage = piece.usage or self.usage

    @property
    def tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices.values())

    @property
    def ended_s(self) -> float:
        return self.arrivals_s[-1] if self.arrivals_s else self.began_s


def difference(expected: Transcript, got: Transcript) -> str | None:
    """What is wrong with `got`; None: nothing. Of a client that has left, all that it got has to be right."""
    if got.failure is not None:
        return f"{got.name}: {got.failure}"
    if not got.has_left and sorted(got.choices) != sorted(expected.choices):
        return f"{got.name}: choices {sorted(got.choices)} instead of {sorted(expected.choices)}"
    for index, choice in sorted(got.choices.items()):
        wrong = _choice_difference(expected.choices[index], choice, is_whole=not got.has_left)
        if wrong is not None:
            return f"{got.name}, choice {index}: {wrong}"
    if not got.has_left and got.usage != expected.usage:
        return f"{got.name}: usage {got.usage} instead of {expected.usage}"
    return None


def _choice_difference(expected: Choice, got: Choice, *, is_whole: bool) -> str | None:
    for what, wanted, found in (
        ("tokens", expected.tokens, got.tokens),
        ("text", expected.text, got.text),
        ("logprobs", expected.logprobs, _rounded(got.logprobs, expected.logprobs)),
    ):
        due = wanted if is_whole else wanted[: len(found)]
        if due != found:
            at = _first_difference(due, found)
            return f"{what} differ from {at} on: {found[at : at + 8]!r} instead of {due[at : at + 8]!r}"
    if is_whole and expected.finish != got.finish:
        return f"ends as {got.finish!r} instead of {expected.finish!r}"
    return None


def _rounded(found: Sequence[float], wanted: Sequence[float]) -> list[float]:
    """Returns the wanted values where only rounding differs: the same prompt in other chunks gives that."""
    pairs = itertools.zip_longest(found, wanted[: len(found)], fillvalue=math.inf)
    return [due if abs(got - due) < ROUNDING else got for got, due in pairs]


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def longest_wait_s(transcript: Transcript, fault_s: float, *, free: str = "") -> float | None:
    """The longest silence that a stream which was open at `fault_s` had from then on; None: it was not open.

    `free`: a router; the time in which a client waits for it in vain, before it goes to another, is not counted.
    """
    if not transcript.began_s <= fault_s < transcript.ended_s:
        return None
    marks = sorted({fault_s, *(at for at in transcript.arrivals_s if at > fault_s)})
    patience = [silence.at_s for silence in transcript.silences if silence.router == free]
    waits = []
    for before, after in itertools.pairwise(marks):
        gave_up = [at for at in patience if before < at < after]
        waits.append(after - max([before, *gave_up]))
    return max(waits)
