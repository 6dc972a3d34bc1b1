"""What a routing decision is made of and what it says: frozen values, so that the router and the simulator share it.

A policy is a pure function: no clock, no socket, no state. What changes from call to call (whose turn it is, the draw
that breaks ties) comes in with the snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twostroke.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as this decision sees it: its own report plus what was placed there since."""

    worker: WorkerId
    queued_tokens: int = 0
    """Known but not yet computed."""
    running: int = 0
    """Sequences that hold pages."""
    waiting: int = 0
    """Requests or pulls that hold nothing yet."""
    pages_free: int = 0
    pages_cached: int = 0
    """Hold blocks that nobody uses at the moment: reusable, at the price of forgetting them."""
    pages_active: int = 0
    seconds_per_token: float = 0.0
    """Of prefill; 0 while unknown."""
    seconds_per_step: float = 0.0
    """Of decode; 0 while unknown."""
    cached_blocks: int = 0
    """Of this request's first blocks, how many it holds or is about to hold."""
    utilisation: float = 0.0
    """Share of the last minute in which it had tokens to prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One answer to place, and where it could go."""

    known_tokens: int
    full_blocks: int
    block_size: int
    page_bytes: int
    decode: tuple[WorkerView, ...]
    """Never empty."""
    prefill: tuple[WorkerView, ...] = ()
    """Page sources besides the decode worker itself."""
    turn: int = 0
    """Counts decisions."""
    draw: float = 0.0
    """In [0, 1): breaks ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Predicted seconds of one candidate, term by term."""

    queue_s: float = 0.0
    """Until the page source has computed what it already has to."""
    prefill_s: float = 0.0
    """Own prefill, priced by what a second there costs everyone else."""
    transfer_s: float = 0.0
    """Of pages, as far as it does not overlap with waiting and computing."""
    admission_s: float = 0.0
    """Until the decode worker has pages for it."""
    harm_s: float = 0.0
    """To streams that already run on the decode worker."""
    damage_pages: int = 0
    """Cached pages that would be forgotten: not a price, but it breaks ties."""

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s + self.transfer_s + self.admission_s + self.harm_s

    def __str__(self) -> str:
        return (
            f"total_s={self.total_s:.4f} queue_s={self.queue_s:.4f} prefill_s={self.prefill_s:.4f} "
            f"transfer_s={self.transfer_s:.4f} admission_s={self.admission_s:.4f} harm_s={self.harm_s:.4f} "
            f"damage_pages={self.damage_pages}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    decode: WorkerId
    source: WorkerId | None
    """Whom the decode worker pulls missing pages from; None: it computes them itself."""
    why: Breakdown
    cached_tokens: int
    """Predicted: prompt tokens that nobody will have to compute."""
    source_tokens: int
    """Predicted: tokens that the page source will have to compute."""


class Policy(Protocol):
    def __call__(self, snapshot: Snapshot) -> Decision: ...


def decide(snapshot: Snapshot, decode: WorkerView, source: WorkerView | None, why: Breakdown | None = None) -> Decision:
    """The decision for one pair, with what it means for caches and queues."""
    held = held_blocks(snapshot, decode, source) * snapshot.block_size
    return Decision(
        decode=decode.worker,
        source=source.worker if source is not None else None,
        why=why or Breakdown(),
        cached_tokens=held,
        source_tokens=0 if source is None else snapshot.full_blocks * snapshot.block_size - held,
    )


def held_blocks(snapshot: Snapshot, decode: WorkerView, source: WorkerView | None) -> int:
    """Leading blocks that nobody has to compute.

    A source needs the KV of all earlier tokens to compute a block: what only the decode worker holds saves the
    transfer, but saves the computation only where it covers everything.
    """
    if source is None or decode.cached_blocks >= snapshot.full_blocks:
        return decode.cached_blocks
    return source.cached_blocks
