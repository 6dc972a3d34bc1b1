"""A worker's end of the network: one page batch at a time in each direction, first come first served.

A copy keeps the way out of its source and the way into its target busy until it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Wire:
    bytes_per_s: float
    out_free_s: float = 0.0
    in_free_s: float = 0.0


def carry(source: Wire, target: Wire, size_bytes: float, ready_s: float) -> float:
    """Book a copy that can begin at `ready_s`; when it ends."""
    begin_s = max(ready_s, source.out_free_s, target.in_free_s)
    end_s = begin_s + size_bytes / min(source.bytes_per_s, target.bytes_per_s)
    source.out_free_s = target.in_free_s = end_s
    return end_s
