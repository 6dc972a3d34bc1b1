"""Reports how the processes of a server ended after it was told to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessExit:
    name: str
    seconds: float
    """Seconds from the request to stop until the process was gone or killed."""
    is_own: bool
    """True where the process ended by itself, False where it was killed."""


def described(exits: Sequence[ProcessExit], seconds: float) -> str:
    """Describes all exits in one sentence; `seconds` is the duration of the whole stop."""
    own = [each.name for each in exits if each.is_own]
    killed = [
        f"{each.name} was killed {each.seconds:.1f} s after it was told to end" for each in exits if not each.is_own
    ]
    parts = [f"{', '.join(own)} ended by {'itself' if len(own) == 1 else 'themselves'}"] if own else []
    return f"stopped after {seconds:.1f} s: {'; '.join([*parts, *killed]) or 'nothing was running'}"
