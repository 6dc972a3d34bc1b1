"""What came of one fault. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.trials.chaos.faults.outcome import is_stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    fault: str
    host: str
    run: int
    bound_s: float | None
    streams: int = 0
    open_streams: int = 0
    """When it struck."""
    wrong: tuple[str, ...] = ()
    """What was wrong with each stream that was not as it should be."""
    turned: tuple[str, ...] = ()
    """Streams whose client had to go to another router, though no router's host was struck."""
    recovery_s: float | None = None
    """Seconds until the next token of the stream that waited longest for it; None: none was open."""
    later_s: float | None = None
    """The longest that a stream which began afterwards waited for its first, or for any further token."""
    capacity_s: float | None = None
    """Seconds until as many workers served as before, and every router knew."""
    fenced_s: float | None = None
    """Seconds for which a replaced epoch still answered after the host was back; None: there was none."""
    overlaps: tuple[str, ...] = ()
    """Two epochs of one worker at once, or a replaced one that came back."""
    missing: str | None = None
    """What did not serve again."""
    left: str | None = None
    """What was never given back."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Refusals by the name of the counter."""

    @property
    def stale(self) -> int:
        """Calls and messages of replaced epochs, refused."""
        return sum(count for name, count in self.refused.items() if is_stale(name))

    @property
    def problems(self) -> tuple[str, ...]:
        found = [*self.wrong, *self.turned, *self.overlaps, *filter(None, (self.missing, self.left))]
        if not self.open_streams:
            found.append("no stream was open")
        if self.recovery_s is not None and self.bound_s is not None and self.recovery_s >= self.bound_s:
            found.append(f"a stream waited {self.recovery_s:.2f} s, {self.bound_s:g} s are allowed")
        return tuple(found)

    @property
    def verdict(self) -> str:
        return "; ".join(self.problems[:3]) or "ok"
