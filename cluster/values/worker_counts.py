"""How many workers of each role there are, and the latency that they are to keep."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.flags.checks import field_of
from twostroke.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    @property
    def pair(self) -> tuple[int, int]:
        return self.prefill, self.decode

    def __str__(self) -> str:
        return f"{self.prefill} prefill + {self.decode} decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """Latency targets; None means no target."""

    ttft_s: float | None
    itl_s: float | None
    """Target of the inter-token latency in seconds, on average over a stream."""
    attainment: float = 0.9
    """Share of requests that must meet the targets."""

    def __post_init__(self) -> None:
        for flag, value in (("--slo-ttft", self.ttft_s), ("--slo-itl", self.itl_s)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{flag} must be a positive number of seconds, got {value:g}", field=field_of(flag))
        if not 0 < self.attainment < 1:
            raise ConfigError(f"--attainment must lie between 0 and 1, got {self.attainment:g}", field="attainment")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStatus:
    """What operators are told of scaling: wanted and serving workers, who decides, and why. Plain values, as JSON."""

    wanted_prefill: int
    wanted_decode: int
    serving_prefill: int
    serving_decode: int
    is_automatic: bool
    reason: str
    """Reason of the last change."""
    decision: str
    """The planner's latest decision; empty where there is none."""

    def lines(self) -> list[str]:
        who = "the planner decides" if self.is_automatic else "counts stay as operators set them"
        lines = [
            f"wanted: {self.wanted_prefill} prefill + {self.wanted_decode} decode; "
            f"serving: {self.serving_prefill} + {self.serving_decode}; {who}"
        ]
        if self.reason:
            lines.append(f"last change: {self.reason}")
        if self.decision:
            lines.append(f"planner: {self.decision}")
        return lines
