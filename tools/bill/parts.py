"""What a feature adds to a bill, and how sizes are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tools.tables import Grid

UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class BilledPart:
    name: str
    """The part's key in the bill's JSON."""
    json: Any
    total_bytes: int = 0
    """What a decode worker holds for it on a CPU in addition."""
    pool_bytes: int = 0
    """Pages among that."""
    rows: tuple[tuple[str, int, str], ...] = ()
    """Rows of the memory's table: part, bytes, and what that is."""
    tables: tuple[tuple[str, Grid], ...] = ()
    """Tables of its own, each with its title."""
    notes: tuple[str, ...] = ()
    are_roles_unlike: bool = False
    """Whether workers of the two roles take different memory."""


def size(size_bytes: float) -> str:
    """Returns a size as people read it: three digits and a unit of powers of 1024."""
    for unit, unit_bytes in UNITS:
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.4g} {unit}"
    return f"{size_bytes:.0f} B"
