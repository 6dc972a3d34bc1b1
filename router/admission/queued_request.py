"""A request that has no worker yet, and what admission decides about it. All times are on the clock of admission."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from router.routing.policy import Decision
from router.routing.selector import RoutingParams
from twostroke.base.ids import RequestId, WorkerId
from twostroke.request import Attempt


@dataclass(frozen=True, slots=True)
class Siblings:
    """Answers that a client wants with the same request: choices of each of its prompts."""

    before: int = 0
    """Answers of the request that come before this one."""
    count: int = 1
    """All answers of the request, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """One attempt at a choice of a request while no worker has it."""

    attempt: Attempt
    routing: RoutingParams = RoutingParams()  # noqa: RUF009  # frozen
    arrived_s: float
    deadline_s: float | None = None
    """When the client gives up."""
    limit_s: float | None = None
    """When the first token has to be there; admission sets it."""
    siblings: Siblings = Siblings()  # frozen
    is_urgent: bool = False
    """Whether it had its turn before: a worker refused it or was lost. It is neither queued nor refused again."""

    @property
    def request_id(self) -> RequestId:
        return self.attempt.request_id

    @property
    def urgency(self) -> tuple[float, float]:
        """Sorts a tenant's own requests: earliest limit first, then earliest arrival."""
        return math.inf if self.limit_s is None else self.limit_s, self.arrived_s


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers to which a request goes, or would go now while it is queued."""

    request: QueuedRequest
    decision: Decision
    decided_at_s: float
    """Begin of the time that its forecast predicts."""
    shares_s: Mapping[WorkerId, float]
    """Seconds that its reservation puts on workers."""
    latest_start_s: float | None
    """Time after which its own prefill comes too late; None where its worker's speed is unknown, or without a limit."""

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def computed_by(self) -> WorkerId:
        return self.decision.computed_by


class Reason(enum.StrEnum):
    SLO = "slo"
    """The first token would come later than the operator allows."""
    DEADLINE = "deadline"
    """The first token would come later than the client waits."""
    QUEUE_FULL = "queue_full"
    """Too many requests wait already."""


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: RequestId
    reason: Reason
    first_token_s: float = 0.0
    """Predicted seconds to the first token."""
    late_s: float = 0.0
    """Seconds by which that would miss the limit."""


@dataclass(frozen=True, slots=True)
class Stranded:
    """The request was queued, and no decode worker serves any more."""

    request_id: RequestId


Verdict = Placement | Refused | Stranded


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    queues: bool = True
    """False: whatever is not refused goes at once, as in systems that queue at their workers."""
    reconsiders: bool = True
    """Whether to decide again when a request's turn comes. Not for policies that choose differently each time they are
    asked."""
    slo_ttft_s: float | None = None
    """Time within which every first token has to come."""
    most_queued: int = 10_000
    lone_ahead_s: float = 10.0
    """Work that a worker is given while only one tenant is active: workers share it out among themselves better than a
    router can from outside (a decode worker computes what waits elsewhere). A second tenant's first request waits as
    long."""
