"""What wants to be admitted, by which rules, to whom it could go, and the verdicts about it."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from router.member import Member
from router.policy import Decision
from router.selector import Ask, Shape
from twostroke.ids import RequestId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanting:
    """One answer that wants to be placed."""

    ask: Ask
    priority: int = 0
    """Class: higher goes first."""
    tenant: str = ""
    arrived_s: float
    deadline_s: float | None = None
    """Of the client; on the same clock as all times of admission."""
    is_urgent: bool = False
    """Never held nor refused: it has had its turn, and lost its worker."""


@dataclass(frozen=True)
class Workers:
    """Those that serve."""

    shape: Shape
    decode: Sequence[Member]
    prefill: Sequence[Member]

    @functools.cached_property
    def everyone(self) -> dict[WorkerId, Member]:
        return {member.worker: member for member in (*self.prefill, *self.decode)}

    def can_serve(self, decision: Decision) -> bool:
        """All that it names are still there."""
        named = (decision.decode, decision.source or decision.decode, decision.peer or decision.decode)
        return all(worker in self.everyone for worker in named)


class Reason(enum.StrEnum):
    SLO = "slo"
    """The first token would come later than the operator allows."""
    DEADLINE = "deadline"
    """Or than the client waits."""
    QUEUE_FULL = "queue_full"
    """Too many wait already."""


@dataclass(frozen=True, slots=True)
class Released:
    request_id: RequestId
    decision: Decision
    decided_at_s: float
    """From when on its forecast counts."""


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: RequestId
    reason: Reason
    first_token_s: float = 0.0
    """Predicted, from now on."""
    late_s: float = 0.0
    """By how much that would miss the limit."""


@dataclass(frozen=True, slots=True)
class Stranded:
    """Held, and no decode worker serves any more."""

    request_id: RequestId


Verdict = Released | Refused | Stranded


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    holds: bool = True
    """False: whatever is not refused goes at once, as in systems that queue at their workers."""
    reconsiders: bool = True
    """Decide anew when its turn comes. Not for policies that choose differently each time they are asked."""
    slo_ttft_s: float | None = None
    """Every first token has to come within this of its request."""
    most_held: int = 10_000
    lone_ahead_s: float = 10.0
    """Work that a worker is given where all requests are one claimant's: workers share it out among themselves better
    than a router can from outside (a decode worker takes over what waits). A second claimant's first one waits as long.
    """
