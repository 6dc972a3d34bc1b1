"""A request that has no worker yet, and the verdicts of admission. All times are of admission's clock."""

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
    """The choices of all prompts of one client request, seen from one of them."""

    before: int = 0
    """Choices of the client request that come before this one."""
    count: int = 1
    """All choices of the client request, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """One attempt at a choice of a request while no worker has it."""

    attempt: Attempt
    routing: RoutingParams = RoutingParams()  # noqa: RUF009  # frozen
    arrived_s: float
    deadline_s: float | None = None
    """When the client gives up, in seconds. `Capacity.limited` makes it earlier."""
    limit_s: float | None = None
    """When the first token must have come, in seconds. Admission sets it."""
    siblings: Siblings = Siblings()  # frozen
    is_urgent: bool = False
    """Whether it was admitted before, and its worker refused it or was lost. It is neither queued nor refused again."""

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
    """When its forecast was made, in seconds: the forecast counts from then."""
    shares_s: Mapping[WorkerId, float]
    """Seconds of work that its reservation adds to workers."""
    latest_start_s: float | None
    """Time after which its own prefill begins too late, in seconds. None: no limit, or a speed that is not trusted."""

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
    """The queue is full, and the request has no right to a place in it."""


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
    """The verdict on a queued request when no decode worker serves any more."""

    request_id: RequestId


Verdict = Placement | Refused | Stranded


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    queues: bool = True
    """Whether requests wait in the router. False: what is not refused goes at once, and workers queue it."""
    reconsiders: bool = True
    """Whether a request is routed again when its turn comes. False for policies that choose differently at each
    call."""
    slo_ttft_s: float | None = None
    """Seconds within which every first token has to come. None: no such limit."""
    most_queued: int = 10_000
    lone_ahead_s: float = 10.0
    """Seconds of work that a worker gets ahead while only one tenant is active. Workers balance it better than a router
    can: a decode worker computes prompts that wait at page sources. A second tenant's first request waits as long."""
