"""Numbers to places on a figure, and the round numbers to write beside them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    step = _round_step(high / 8)
    start, end = pixels

    def at(value: float) -> float:
        return start + (end - start) * value / high

    marks = [step * number for number in range(math.floor(high / step + 1e-9) + 1)]
    return Axis(at, tuple((at(mark), f"{mark:g}") for mark in marks))


def log_axis(low: float, high: float, pixels: tuple[float, float]) -> Axis:
    """From `low` to `high`, both positive; what lies outside is drawn at the edge."""
    bottom, top = math.log10(low), math.log10(high)
    bottom, top = bottom - 0.05, max(top, bottom + 0.3) + 0.05
    start, end = pixels

    def at(value: float) -> float:
        exponent = math.log10(value) if value > 0 else bottom
        return start + (end - start) * (min(max(exponent, bottom), top) - bottom) / (top - bottom)

    digits = _digits(top - bottom)
    marks = [digit * 10.0**decade for decade in range(math.floor(bottom), math.ceil(top) + 1) for digit in digits]
    return Axis(at, tuple((at(mark), f"{mark:g}") for mark in marks if bottom <= math.log10(mark) <= top))


def tail_axis(pixels: tuple[float, float]) -> Axis:
    """Percentiles, every further nine as wide as the one before: the tail is what one looks for."""
    start, end = pixels
    widest = _nines(TAIL_PERCENTILES[-1])

    def at(percentile: float) -> float:
        return start + (end - start) * min(1.0, _nines(percentile) / widest)

    return Axis(at, tuple((at(mark), f"p{mark:g}") for mark in TAIL_PERCENTILES))


def _nines(percentile: float) -> float:
    return -math.log10(max(1e-9, 1 - percentile / 100))


def _digits(decades: float) -> tuple[int, ...]:
    if decades > 3:
        return (1,)
    return (1, 2, 5) if decades > 0.8 else (1, 2, 3, 4, 5, 6, 8)


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    decade = 10.0 ** math.floor(math.log10(step))
    return next(digit * decade for digit in (1, 2, 5, 10) if digit * decade >= step * (1 - 1e-9))
