"""What people are told of scaling: who is wanted, who serves, who decides, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Plain values: it travels as JSON."""

    wanted_prefill: int
    wanted_decode: int
    serving_prefill: int
    serving_decode: int
    is_automatic: bool
    reason: str
    """Of the last change."""
    outlook: str
    """What the planner thinks now; empty where there is none."""

    def lines(self) -> list[str]:
        who = "the planner decides" if self.is_automatic else "counts stay as they were said"
        lines = [
            f"wanted: {self.wanted_prefill} prefill + {self.wanted_decode} decode; "
            f"serving: {self.serving_prefill} + {self.serving_decode}; {who}"
        ]
        if self.reason:
            lines.append(f"last change: {self.reason}")
        if self.outlook:
            lines.append(f"planner: {self.outlook}")
        return lines
