"""What a worker's memory was predicted to be, beside what the system says that it is."""

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
    """Bytes as the system says; None where it does not say it of this part alone."""


def pages_use(memory: Pages) -> MemoryUse:
    return MemoryUse("pages", memory.layout.host_bytes, memory.held_bytes)
