"""What came of one fault. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.trials.chaos.faults.trials import Trial
from tests.trials.chaos.injection.points import SPOILING

MISMATCHES = "twostroke_digest_mismatches_total"
STALE = "_stale_"


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens of a draft model. What a worker has counted and not told before it dies is missing."""

    run: int = 0
    kept: int = 0

    def plus(self, other: Drafts) -> Drafts:
        return Drafts(self.run + other.run, self.kept + other.kept)

    def since(self, before: Drafts) -> Drafts:
        return Drafts(self.run - before.run, self.kept - before.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRest:
    """The pages of a worker when all faults of its cluster are over and nobody asks anything."""

    worker: str
    ranks: int
    """Processes that hold a range of heads of every page."""
    total: int
    free: int
    cached: int
    pinned: int
    drafting: int | None
    """Pages of its draft model that are in use; None where it has none."""

    @property
    def leaked(self) -> int:
        return self.total - self.free - self.cached - self.pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    trial: Trial
    transports: str
    """The cluster's; empty: its default."""
    model: str
    broken: str
    """The process."""
    fault: str
    has_happened: bool
    streams: int
    wrong: tuple[str, ...]
    """What was wrong with each stream that was not as it should be."""
    left: str | None
    """What was never given back."""
    missing: str | None
    """What did not serve again."""
    recovery_s: float | None
    """From the fault to the next token of the stream that waited longest for it; None: none was open."""
    slowest: str
    """Which that was, and where its client turned."""
    resumed: int
    """Streams that went on at another router."""
    met: int | None = None
    """Streams of what was frozen or cut off, that went on elsewhere when it was back; None: it was none of these."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Refusals by the name of the counter."""
    drafts: Drafts = Drafts()
    """Tokens of a draft model meanwhile, on all workers."""
    draft_age_s: float | None = None
    """From the last tokens of a draft model that the broken worker ran to the fault; None: it had run none."""
    took_s: float = 0.0

    @classmethod
    def lost(cls, trial: Trial, transports: str, model: str, why: str) -> Outcome:
        """The trial could not be ended."""
        return cls(
            trial=trial,
            transports=transports,
            model=model,
            broken="",
            fault="",
            has_happened=False,
            streams=0,
            wrong=(),
            left=None,
            missing=f"the cluster is past help: {why}",
            recovery_s=None,
            slowest="",
            resumed=0,
        )

    @property
    def damage(self) -> str | None:
        """Digests are the last guard: without damage on the wire, the others have failed."""
        count = self.refused.get(MISMATCHES, 0)
        return f"{count} pages were damaged though nobody damaged them" if count and not self.is_spoiling else None

    @property
    def is_spoiling(self) -> bool:
        return self.trial.kind in SPOILING

    @property
    def is_lossy(self) -> bool:
        """Something was lost, left or damaged."""
        return bool(self.wrong or self.left or self.missing or self.damage)

    @property
    def is_miss(self) -> bool:
        return self.is_lossy or not self.has_happened

    @property
    def verdict(self) -> str:
        found = [*self.wrong[:3], *filter(None, (self.left, self.missing, self.damage))]
        if not self.has_happened:
            found.insert(0, "not reached")
        return "; ".join(found) if found else "ok"


def is_stale(counter: str) -> bool:
    return STALE in counter


def stale(refused: Mapping[str, int]) -> str:
    """What was refused because its time was over, in words."""
    counts = {name: count for name, count in refused.items() if is_stale(name) and count}
    return ", ".join(f"{name.removeprefix('twostroke_')} {count}" for name, count in sorted(counts.items())) or "silent"
