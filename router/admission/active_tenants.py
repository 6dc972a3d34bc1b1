"""Which tenants send requests, and how many slots of decode workers their requests hold. Pure.

While all requests are one tenant's, in one class, their order hardly matters.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from router.admission.fair_queue import SIBLINGS_AT_ONCE
from router.admission.queued_request import QueuedRequest
from twostroke.base.ids import RequestId, WorkerId

REMEMBERED_S = 60.0
"""Time for which a tenant stays active after a request: others' work must not pile up between its requests."""


class ActiveTenant(NamedTuple):
    """Requests that compete with others as one."""

    priority: int
    tenant: str
    siblings: int
    """Choices of a client request for so many that others would wait for them; 0 for fewer."""

    @classmethod
    def of(cls, request: QueuedRequest) -> ActiveTenant:
        count = request.siblings.count
        return cls(request.routing.priority, request.routing.tenant, count if count > SIBLINGS_AT_ONCE else 0)


class ActiveTenants:
    def __init__(self) -> None:
        self._arrived_at_s: dict[ActiveTenant, float] = {}
        """The longest ago comes first."""
        self._by_priority: Counter[int] = Counter()

    @property
    def are_several(self) -> bool:
        return len(self._arrived_at_s) > 1

    def has_rivals(self, claim: ActiveTenant) -> bool:
        """Returns whether other tenants with the same or a higher class are active."""
        others = sum(count for priority, count in self._by_priority.items() if priority >= claim.priority)
        return others > (claim in self._arrived_at_s)

    def arrived(self, request: QueuedRequest, now_s: float) -> None:
        claim = ActiveTenant.of(request)
        if self._arrived_at_s.pop(claim, None) is None:
            self._by_priority[claim.priority] += 1
        self._arrived_at_s[claim] = now_s
        while next(iter(self._arrived_at_s.values())) + REMEMBERED_S < now_s:
            self._forget(next(iter(self._arrived_at_s)))

    def _forget(self, claim: ActiveTenant) -> None:
        del self._arrived_at_s[claim]
        self._by_priority[claim.priority] -= 1
        if not self._by_priority[claim.priority]:
            del self._by_priority[claim.priority]


class Slots:
    """Slots of decode workers that requests hold, with those of requests on their way there."""

    def __init__(self) -> None:
        self._held: dict[RequestId, tuple[WorkerId, ActiveTenant]] = {}
        self._counts: Counter[tuple[WorkerId, ActiveTenant]] = Counter()

    def take(self, request_id: RequestId, worker: WorkerId, claim: ActiveTenant) -> None:
        """Notes that the request goes to `worker`, and has left the worker that it had before."""
        self.give_back(request_id)
        self._held[request_id] = worker, claim
        self._counts[worker, claim] += 1

    def give_back(self, request_id: RequestId) -> None:
        """Notes that the request is over. It may hold no slot."""
        held = self._held.pop(request_id, None)
        if held is None:
            return
        self._counts[held] -= 1
        if not self._counts[held]:
            del self._counts[held]

    def taken(self, worker: WorkerId, claim: ActiveTenant) -> int:
        return self._counts[worker, claim]
