"""How the processes of a server ended when it was told to stop: what is said of it must be true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ending:
    name: str
    seconds: float
    """From the order to end until it was gone, or until it was killed."""
    is_own: bool
    """It ended by itself; else it was killed."""


def described(endings: Sequence[Ending], seconds: float) -> str:
    """One sentence for all of them; `seconds` is what the whole stop took."""
    own = [ending.name for ending in endings if ending.is_own]
    killed = [
        f"{ending.name} was killed {ending.seconds:.1f} s after it was told to end"
        for ending in endings
        if not ending.is_own
    ]
    parts = [f"{', '.join(own)} ended by {'itself' if len(own) == 1 else 'themselves'}"] if own else []
    return f"stopped after {seconds:.1f} s: {'; '.join([*parts, *killed]) or 'nothing was running'}"
