"""What wants to be admitted, by which rules, to whom it could go, and the verdicts about it."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.fleet.worker import Member
from router.routing.policy import Decision
from router.routing.selector import Ask, Shape
from twostroke.ids import RequestId, WorkerId
from twostroke.request import Siblings


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
    siblings: Siblings = Siblings()  # noqa: RUF009  # frozen


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


@dataclass(slots=True)
class Held:
    wanting: Wanting
    limit_s: float | None
    """When its first token has to be there."""
    decision: Decision
    shares_s: Mapping[WorkerId, float]
    """Seconds that its reservation puts on workers."""
    decided_at_s: float
    latest_start_s: float | None
    """From when on its own prefill would come too late; None where nothing is known of its worker, or no limit set."""

    @property
    def request_id(self) -> RequestId:
        return self.wanting.ask.request_id

    @property
    def computer(self) -> WorkerId:
        return self.decision.source or self.decision.decode


def urgency(held: Held) -> tuple[float, float]:
    return math.inf if held.limit_s is None else held.limit_s, held.wanting.arrived_s


def add_shares(total_s: dict[WorkerId, float], shares_s: Mapping[WorkerId, float], sign: int) -> None:
    for worker, seconds in shares_s.items():
        total_s[worker] = total_s.get(worker, 0.0) + sign * seconds
