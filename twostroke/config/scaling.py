"""Bounds and promises of the planner. Without room between the bounds, nothing scales."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.base.errors import ConfigError
from twostroke.config.settings import Settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The least and most workers of one role."""

    least: int
    most: int

    def clamp(self, count: int) -> int:
        return max(self.least, min(self.most, count))


class ScalingConfig(Settings):
    min_prefill: int | None = setting(
        None, least=0, help="least prefill workers that the planner keeps", default_text="as --prefill"
    )
    max_prefill: int | None = setting(
        None, least=0, help="most prefill workers that the planner keeps", default_text="as --prefill"
    )
    min_decode: int | None = setting(
        None, least=1, help="least decode workers that the planner keeps", default_text="as --decode"
    )
    max_decode: int | None = setting(
        None, least=1, help="most decode workers that the planner keeps", default_text="as --decode"
    )
    slo_itl_s: float | None = setting(
        None,
        above=0,
        help="average time between two tokens that the planner keeps by adding decode workers; steps beside which "
        "prompts wait are planned shorter; --slo-ttft is the same for first tokens",
        default_text="as many as hold the streams",
    )
    flexible: bool = setting(
        False,
        help="load what either role needs, for `twostroke role`, even where the bounds leave no room to switch",
    )
    tick_s: float = setting(1.0, is_hidden=True, above=0, help="time between two looks at the load")
    up_s: float = setting(
        5.0,
        is_hidden=True,
        above=0,
        help="time for which more workers must be needed before they are added; shorter bursts just queue",
    )
    down_s: float = setting(
        60.0, is_hidden=True, above=0, help="time for which fewer workers must be enough before some are removed"
    )
    average_s: float = setting(10.0, is_hidden=True, above=0, help="time over which rates are averaged")

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
        problem = f"--min-{role} {bounds.least}, --{role} {count}, --max-{role} {bounds.most}"
        raise ConfigError(f"{problem}: the count must lie between the bounds", field=f"--{role}")
    return bounds
