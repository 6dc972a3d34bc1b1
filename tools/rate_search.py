"""From the rates tried so far to the next one: doubling or halving until one passes and one fails, then in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.base.errors import ConfigError

STRIDE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    start: float
    lowest: float
    highest: float
    precision: float

    def __post_init__(self) -> None:
        if not self.lowest <= self.start <= self.highest:
            raise ConfigError(
                f"--start-rate {self.start:g} must lie from --min-rate {self.lowest:g} to --max-rate {self.highest:g}",
                field="start_rate",
            )


@dataclass(frozen=True, slots=True)
class Tried:
    rate: float
    passed: bool


def decided(votes: Sequence[Tried], of: int) -> list[Tried]:
    """Returns the rates on which more than half of `of` votes agree; the others want another vote."""
    by_rate: dict[float, list[bool]] = {}
    for vote in votes:
        by_rate.setdefault(vote.rate, []).append(vote.passed)
    return [
        Tried(rate, passed)
        for rate, given in by_rate.items()
        for passed in (True, False)
        if 2 * given.count(passed) > of
    ]


@dataclass(frozen=True, slots=True)
class Bracket:
    """Between which rates the truth lies, by what was tried."""

    passing: float | None
    failing: float | None


def bracket_of(tried: Sequence[Tried]) -> Bracket:
    """Returns the lowest failing rate, and the highest passing one below it: a lucky pass above does not count."""
    failing = min((each.rate for each in tried if not each.passed), default=None)
    passing = max(
        (each.rate for each in tried if each.passed and (failing is None or each.rate < failing)), default=None
    )
    return Bracket(passing, failing)


def next_rate(tried: Sequence[Tried], limits: SearchLimits) -> float | None:
    """Returns the next rate to try. None when the bracket is narrow enough, or lies beyond the limits."""
    if not tried:
        return limits.start
    bracket = bracket_of(tried)
    if bracket.failing is None:
        assert bracket.passing is not None
        return None if bracket.passing >= limits.highest else min(limits.highest, bracket.passing * STRIDE)
    if bracket.passing is None:
        return None if bracket.failing <= limits.lowest else max(limits.lowest, bracket.failing / STRIDE)
    if bracket.failing <= bracket.passing * (1 + limits.precision):
        return None
    middle = math.sqrt(bracket.passing * bracket.failing)
    return middle if bracket.passing < middle < bracket.failing else None
