"""What operators are told of scaling: wanted and serving workers, who decides, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStatus:
    """Plain values, which travel as JSON."""

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
