"""The memory that a worker was predicted to take, and what it takes as the system measures it."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.kv_cache.memory import Pages


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """One part of a worker's memory."""

    part: str
    """"pages" or "weights"."""
    billed_bytes: int
    """Bytes as `twostroke bill` counts them."""
    measured_bytes: int | None
    """Bytes as the system says; None where the system does not measure this part separately."""


def pages_use(memory: Pages) -> MemoryUse:
    return MemoryUse("pages", memory.layout.host_bytes, memory.held_bytes)
