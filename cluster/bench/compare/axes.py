"""Numbers to places on a figure, and the round numbers to write beside them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TAIL_PERCENTILES = (0.0, 50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from values to pixels."""

    at: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]
    """Pixel and label."""


def linear_axis(high: float, pixels: tuple[float, float]) -> Axis:
    """From 0 to `high`."""
    high = max(high, 1e-9)
    step = _round_step(high / 6)
    start, end = pixels

    def at(value: float) -> float:
        return start + (end - start) * value / high

    marks = [step * number for number in range(math.floor(high / step + 1e-9) + 1)]
    return Axis(at, tuple((at(mark), f"{mark:g}") for mark in marks))


def log_axis(values: Sequence[float], pixels: tuple[float, float]) -> Axis:
    """Over the positive values, with marks at 1, 2 and 5 of every decade (1 alone where there are many decades)."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = math.log10(min(positive)), math.log10(max(positive))
    low, high = low - 0.05, max(high, low + 0.3) + 0.05
    start, end = pixels

    def at(value: float) -> float:
        exponent = math.log10(value) if value > 0 else low
        return start + (end - start) * (exponent - low) / (high - low)

    digits = (1, 2, 5) if high - low < 3 else (1,)
    marks = [digit * 10.0**decade for decade in range(math.floor(low), math.ceil(high) + 1) for digit in digits]
    return Axis(at, tuple((at(mark), f"{mark:g}") for mark in marks if low <= math.log10(mark) <= high))


def tail_axis(pixels: tuple[float, float]) -> Axis:
    """Percentiles, every further nine as wide as the one before: the tail is what one looks for."""
    start, end = pixels
    widest = _nines(TAIL_PERCENTILES[-1])

    def at(percentile: float) -> float:
        return start + (end - start) * min(1.0, _nines(percentile) / widest)

    return Axis(at, tuple((at(mark), f"p{mark:g}") for mark in TAIL_PERCENTILES))


def _nines(percentile: float) -> float:
    return -math.log10(max(1e-9, 1 - percentile / 100))


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    decade = 10.0 ** math.floor(math.log10(step))
    return next(digit * decade for digit in (1, 2, 5, 10) if digit * decade >= step * (1 - 1e-9))
