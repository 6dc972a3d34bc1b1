"""Bounds and promises of the planner. Without room between the bounds, nothing scales."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostroke.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of one role's workers."""

    least: int
    most: int

    def clamp(self, count: int) -> int:
        return max(self.least, min(self.most, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    min_prefill: int | None = None
    """None, here and below: as many as there are at the start."""
    max_prefill: int | None = None
    min_decode: int | None = None
    max_decode: int | None = None
    slo_itl_s: float | None = None
    """Between two tokens of an answer, on average: the planner keeps decode workers for it. None: as many as have room
    for the streams."""
    flexible: bool = False
    """Workers load what either role needs, so that they can switch even where the bounds leave no room for it."""
    tick_s: float = 1.0
    """Between two looks at the load."""
    up_s: float = 5.0
    """More are needed for so long: then they come. A burst of seconds is a queue."""
    down_s: float = 60.0
    """Fewer would do for so long: then some go."""
    window_s: float = 10.0
    """Rates are taken over so long."""

    def __post_init__(self) -> None:
        for name in ("min_prefill", "max_prefill", "min_decode", "max_decode"):
            value, least = getattr(self, name), 1 if name.endswith("decode") else 0
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be {least} or more, got {value}", field=name)
        for name in ("slo_itl_s", "tick_s", "up_s", "down_s", "window_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                flag = name.removesuffix("_s").replace("_", "-")
                raise ConfigError(f"--{flag} must be a positive number of seconds, got {value:g}", field=name)

    def prefill_bounds(self, count: int) -> Bounds:
        """Raises ConfigError where the count that is started lies outside."""
        return _bounds("prefill", self.min_prefill, count, self.max_prefill)

    def decode_bounds(self, count: int) -> Bounds:
        return _bounds("decode", self.min_decode, count, self.max_decode)

    def scales(self, prefill: int, decode: int) -> bool:
        bounds = (self.prefill_bounds(prefill), self.decode_bounds(decode))
        return any(each.least < each.most for each in bounds)

    def may_switch(self, prefill: int, decode: int) -> bool:
        bounds = (self.prefill_bounds(prefill), self.decode_bounds(decode))
        return self.flexible or all(each.least < each.most for each in bounds)


def _bounds(role: str, least: int | None, count: int, most: int | None) -> Bounds:
    bounds = Bounds(least=count if least is None else least, most=count if most is None else most)
    if not bounds.least <= count <= bounds.most:
        said = f"--min-{role} {bounds.least}, --{role} {count}, --max-{role} {bounds.most}"
        raise ConfigError(f"{said}: the count must lie between the bounds", field=f"--{role}")
    return bounds
