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
