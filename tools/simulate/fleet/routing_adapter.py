"""What a simulated router asks of whoever decides for it.

The simulator moves requests, tokens and event batches through virtual time; index, reservations, admission and policy
are the live router's own objects behind this interface. No method waits: what is decided later is fetched by `due`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.config import Role
from twostroke.ids import BlockName, Epoch, RequestId, WorkerId
from twostroke.kv_cache.events import EventBatch
from twostroke.rpc.v1.control_pb2 import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One answer that wants to be placed, for the first time or again."""

    request_id: RequestId
    arrived_s: float
    known_tokens: int
    """Of prompt and answer so far."""
    names: tuple[BlockName, ...]
    """Of their full blocks."""
    most_answer_tokens: int
    tenant: str = ""
    priority: int = 0
    has_had_turn: bool = False
    """It was placed, on a worker that was lost."""
    without: frozenset[WorkerId] = frozenset()
    """Decode workers that have refused it already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    request_id: RequestId
    decode: WorkerId
    source: WorkerId | None
    peer: WorkerId | None
    peer_blocks: int
    decided_s: float
    first_token_s: float
    """Predicted, from then on."""
    cached_blocks: int
    """Predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    request_id: RequestId
    retry_after_s: float | None


class Brain(Protocol):
    """Of one router."""

    def joined(self, worker: WorkerId, role: Role, epoch: Epoch) -> None:
        """The supervisor lists this life of the worker."""

    def heard(self, worker: WorkerId, epoch: Epoch, batch: EventBatch, load: Load, now_s: float) -> bool:
        """One event batch. False where the log does not follow on: ask for it again from `next_sequence`."""

    def next_sequence(self, worker: WorkerId, epoch: Epoch) -> int | None:
        """None: only a snapshot helps."""

    def left(self, worker: WorkerId, now_s: float) -> None:
        """This life is over."""

    def place(self, ask: Ask, now_s: float) -> None:
        """Answered by `due`, now or later."""

    def due(self, now_s: float) -> Sequence[Placement | Refusal]:
        """What has been decided and not been fetched yet."""

    def wake_s(self) -> float | None:
        """When `due` is to be asked next even if nothing happens before."""

    def opened(self, request_id: RequestId, now_s: float) -> None: ...

    def first_token(self, request_id: RequestId, now_s: float) -> None: ...

    def ended(self, request_id: RequestId, answer_tokens: int | None, now_s: float) -> None:
        """The attempt is over; with its whole answer, unless it was lost or refused."""

    def news(self, router: str) -> object | None:
        """What another router has not been told yet of this one's reservations: meant for its brain alone."""

    def heard_router(self, router: str, news: object, now_s: float) -> None:
        """What the brain of another router said by `news`."""

    def left_router(self, router: str, now_s: float) -> None:
        """It has died, and comes back with nothing."""

    def blocks(self, worker: WorkerId) -> EventBatch | None:
        """The worker's set as the index has it, as a snapshot; None where it is not known to be true."""

    def counts(self) -> BrainCounts: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BrainCounts:
    reservations: int
    """Open now."""
    decisions: int
    decision_cpu_s: float
    gaps: int
    snapshots: int
    divergences: int
    false_refusals: int = 0
    """Refused ones that would have made it, as far as can be known."""
