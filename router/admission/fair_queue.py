"""The order of queued requests: higher classes first, tenants of a class in turns, a tenant's requests by urgency.

Tenants of a class are served by deficit round robin (Shreedhar and Varghese, SIGCOMM 1995). The last request of a round
may exceed the tenant's share, which the tenant pays for in the next round (surplus round robin; Adiseshu, Parulkar and
Varghese, SIGCOMM 1996). Rounds are kept as the seconds that a tenant was served. So an expensive request causes no
empty rounds. Finding the next few requests takes the same time, however many wait. A tenant's own requests go
earliest limit first (EDF). Of a request with many choices, the later ones go behind other requests.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.admission.queued_request import QueuedRequest
from twostroke.base.ids import RequestId

COST_MEMORY = 0.05
"""Weight of the latest cost in the quantum: the mean of the last twenty or so."""
MOST_CREDIT_QUANTA = 4
"""Most rounds that a tenant can catch up on when its worker was busy at its turns."""
LEAST_COST_S = 1e-4
"""Least cost of a request, in seconds: with cost 0, a tenant's turn would never end."""
STALE_SPARED = 64
"""Stale entries that a class's heap may have, besides one for each tenant, before they are removed."""
MOST_LOOKED_AT = 256
"""Most tenants that `share_before` looks at: it is called for each arrival, and they stand for all."""
MOST_OVERDRAWN = 2048
"""Most tenants of a class that are remembered without queued requests. Those that were served least are forgotten."""

SIBLINGS_AT_ONCE = 16
"""Choices of one client request that are queued like requests of their own. The next 16 go after the first 16 of all
other requests, and so on."""

_Key = tuple[int, float, float, float]
"""Order of a tenant's requests: number of full groups of siblings before it, limit, arrival, order of `add`."""


@dataclass(slots=True)
class _Entry:
    request: QueuedRequest
    key: _Key
    cost_s: float


@dataclass(slots=True)
class _Tenant:
    served_s: float
    """Seconds of work that were served to it. A new tenant begins with the class's `round_begin_s`. One that returns
    begins with its former ones, if these are more."""
    keys: list[_Key] = field(default_factory=list)
    """Keys of its queued requests, sorted."""
    entries: dict[_Key, _Entry] = field(default_factory=dict)
    queued_s: float = 0.0
    key: tuple[float, int] | None = None
    """The tenant's valid entry in the class's heap: begin of its round, order of joining the round."""


@dataclass(slots=True)
class _Class:
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    heap: list[tuple[float, int, str]] = field(default_factory=list)
    round_begin_s: float = 0.0
    """Begin of the latest round in which a tenant was served."""
    queued_s: float = 0.0
    overdrawn_s: dict[str, float] = field(default_factory=dict)
    """Served seconds of tenants without queued requests, if they are more than `round_begin_s`."""

    def start_s(self, name: str) -> float:
        """Returns the served seconds with which a tenant begins.

        So a tenant that always waits for its last request before it sends the next one gets no extra turns.
        """
        return max(self.round_begin_s, self.overdrawn_s.get(name, 0.0))

    def leave(self, name: str) -> None:
        """Removes a tenant without queued requests."""
        served_s = self.tenants.pop(name).served_s
        if served_s > self.round_begin_s:
            self.overdrawn_s[name] = served_s
        if len(self.overdrawn_s) > MOST_OVERDRAWN:
            largest = sorted(self.overdrawn_s.items(), key=lambda entry: entry[1], reverse=True)[: MOST_OVERDRAWN // 2]
            self.overdrawn_s = {each: served_s for each, served_s in largest if served_s > self.round_begin_s}


class FairQueue:
    def __init__(self) -> None:
        self.quantum_s = LEAST_COST_S
        """Seconds that a tenant gets in each round: the mean cost of recent requests."""
        self._has_quantum = False
        self._classes: dict[int, _Class] = {}
        self._entries: dict[RequestId, _Entry] = {}
        self._counts: Counter[str] = Counter()
        """Number of queued requests of each tenant that has some, in all classes."""
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._entries)

    def add(self, request: QueuedRequest, cost_s: float) -> None:
        """Queues a request. `cost_s` is the predicted cost of its prompt and its output."""
        group = self._classes.setdefault(request.routing.priority, _Class())
        tenant = group.tenants.get(request.routing.tenant)
        if tenant is None:
            tenant = group.tenants[request.routing.tenant] = _Tenant(group.start_s(request.routing.tenant))
            self._join_round(group, request.routing.tenant, tenant)
        entry = _Entry(request, _key(request, next(self._order)), max(LEAST_COST_S, cost_s))
        bisect.insort(tenant.keys, entry.key)
        tenant.entries[entry.key] = self._entries[request.request_id] = entry
        self._counts[request.routing.tenant] += 1
        _weigh(group, tenant, entry.cost_s)

    def reprice(self, request_id: RequestId, cost_s: float) -> None:
        """Changes the cost of a queued request, which would go to another worker now."""
        entry = self._entries[request_id]
        group = self._classes[entry.request.routing.priority]
        cost_s = max(LEAST_COST_S, cost_s)
        _weigh(group, group.tenants[entry.request.routing.tenant], cost_s - entry.cost_s)
        entry.cost_s = cost_s

    def serve(self, request_id: RequestId) -> None:
        """Removes a request that is sent. Its cost counts as served to its tenant."""
        entry = self._entries[request_id]
        group = self._classes[entry.request.routing.priority]
        tenant = group.tenants[entry.request.routing.tenant]
        assert tenant.key is not None, "a tenant with queued requests is in a round"
        group.round_begin_s = max(group.round_begin_s, tenant.key[0])
        least_s = group.round_begin_s - MOST_CREDIT_QUANTA * self.quantum_s
        tenant.served_s = max(tenant.served_s, least_s) + entry.cost_s
        weight = COST_MEMORY if self._has_quantum else 1.0
        self._has_quantum = True
        self.quantum_s += weight * (entry.cost_s - self.quantum_s)
        self._join_round(group, entry.request.routing.tenant, tenant)
        self.remove(request_id)

    def remove(self, request_id: RequestId) -> None:
        """Removes a request. Its cost does not count as served."""
        entry = self._entries.pop(request_id)
        name = entry.request.routing.tenant
        group = self._classes[entry.request.routing.priority]
        tenant = group.tenants[name]
        del tenant.keys[bisect.bisect_left(tenant.keys, entry.key)]
        del tenant.entries[entry.key]
        _weigh(group, tenant, -entry.cost_s)
        self._counts[name] -= 1
        if not self._counts[name]:
            del self._counts[name]
        if not tenant.keys:
            group.leave(name)
        if not group.tenants:
            del self._classes[entry.request.routing.priority]

    def first(self, count: int) -> list[RequestId]:
        """Returns the next requests in order, as if each could go. The order stays the same."""
        found: list[RequestId] = []
        for priority in sorted(self._classes, reverse=True):
            found += self._first_of(self._classes[priority], count - len(found))
            if len(found) == count:
                break
        return found

    def displaced_by(self, request: QueuedRequest) -> RequestId | None:
        """Returns the request that leaves a full queue for this one. None: this one itself is refused.

        Every tenant has an equal share of the queue. If this request's tenant is below its share, another tenant's
        least urgent request leaves: in the lowest class with a tenant above its share, that of the largest such
        tenant. Otherwise its own least urgent request of a lower class leaves, if it has one.
        """
        own = self._counts[request.routing.tenant]
        share = len(self._entries) / (len(self._counts) + (own == 0))
        if own + 1 > share:
            return self._least_urgent_below(request)
        for priority in sorted(self._classes):
            tenants = self._classes[priority].tenants
            larger = [name for name in tenants if self._counts[name] > share]
            if larger:
                largest = max(larger, key=lambda name: len(tenants[name].keys))
                return _least_urgent(tenants[largest])
        return None

    def queued_s_by_tenant(self) -> dict[str, float]:
        """Returns the cost of each tenant's queued requests in all classes, in seconds."""
        queued: dict[str, float] = {}
        for group in self._classes.values():
            for name, tenant in group.tenants.items():
                queued[name] = queued.get(name, 0.0) + tenant.queued_s
        return queued

    def share_before(self, request: QueuedRequest) -> float:
        """Returns the share of its class's queued seconds that is served before the request.

        Those are its tenant's more urgent requests, and what every other tenant is served until then.
        """
        group = self._classes.get(request.routing.priority)
        if group is None or group.queued_s <= 0:
            return 0.0
        own = group.tenants.get(request.routing.tenant)
        own_s, start_s = 0.0, group.start_s(request.routing.tenant)
        if own is not None:
            entry = self._entries.get(request.request_id)
            key = _key(request, math.inf) if entry is None else entry.key
            position = bisect.bisect_left(own.keys, key)
            own_s = own.queued_s * position / len(own.keys)
            start_s = own.served_s + own_s
        others = [each for each in itertools.islice(group.tenants.values(), MOST_LOOKED_AT) if each is not own]
        given_s = sum(min(each.queued_s, max(0.0, start_s + self.quantum_s - each.served_s)) for each in others)
        rest = len(group.tenants) - (own is not None) - len(others)
        rest_s = group.queued_s - sum(each.queued_s for each in (*others, *([] if own is None else [own])))
        others_s = given_s + min(max(0.0, rest_s), given_s * rest / max(1, len(others)))
        return min(1.0, (own_s + others_s) / group.queued_s)

    def _least_urgent_below(self, request: QueuedRequest) -> RequestId | None:
        """Returns the least urgent request of the same tenant in its lowest class, if that is below the request's."""
        for priority in sorted(self._classes):
            tenant = self._classes[priority].tenants.get(request.routing.tenant)
            if priority < request.routing.priority and tenant is not None:
                return _least_urgent(tenant)
        return None

    def _first_of(self, group: _Class, count: int) -> list[RequestId]:
        found: list[RequestId] = []
        seen: list[tuple[float, int, str]] = []
        again: list[tuple[float, int, str, int, float]] = []
        """Tenants with requests for further rounds: heap entry, number of taken requests, served seconds after them."""
        while len(found) < count:
            fresh = _valid_top(group)
            if fresh is not None and (not again or fresh[:2] < again[0][:2]):
                seen.append(heapq.heappop(group.heap))
                begin_s, _, name, taken, served_s = *fresh, 0, group.tenants[fresh[2]].served_s
            elif again:
                begin_s, _, name, taken, served_s = heapq.heappop(again)
            else:
                break
            tenant = group.tenants[name]
            while True:
                entry = tenant.entries[tenant.keys[taken]]
                found.append(entry.request.request_id)
                taken, served_s = taken + 1, served_s + entry.cost_s
                is_over = served_s >= begin_s + self.quantum_s
                if is_over or taken == len(tenant.keys) or len(found) == count:
                    break
            if taken < len(tenant.keys):
                heapq.heappush(again, (self._round(served_s), next(self._order), name, taken, served_s))
        for key in seen:
            heapq.heappush(group.heap, key)
        return found

    def _join_round(self, group: _Class, name: str, tenant: _Tenant) -> None:
        """Puts a tenant into the round of its served seconds, behind those that are already in it."""
        if tenant.key is not None and tenant.served_s < tenant.key[0] + self.quantum_s:
            return
        tenant.key = (self._round(tenant.served_s), next(self._order))
        heapq.heappush(group.heap, (*tenant.key, name))
        if len(group.heap) > 2 * len(group.tenants) + STALE_SPARED:
            group.heap = [entry for entry in group.heap if _is_valid(group, entry)]
            heapq.heapify(group.heap)

    def _round(self, served_s: float) -> float:
        return served_s - served_s % self.quantum_s


def _weigh(group: _Class, tenant: _Tenant, change_s: float) -> None:
    group.queued_s += change_s
    tenant.queued_s += change_s


def _valid_top(group: _Class) -> tuple[float, int, str] | None:
    """Drops entries of tenants that are in other rounds or have left. Returns the first valid entry."""
    while group.heap:
        if _is_valid(group, group.heap[0]):
            return group.heap[0]
        heapq.heappop(group.heap)
    return None


def _is_valid(group: _Class, entry: tuple[float, int, str]) -> bool:
    tenant = group.tenants.get(entry[2])
    return tenant is not None and tenant.key == entry[:2]


def _least_urgent(tenant: _Tenant) -> RequestId:
    return tenant.entries[tenant.keys[-1]].request.request_id


def _key(request: QueuedRequest, order: float) -> _Key:
    return (request.siblings.before // SIBLINGS_AT_ONCE, *request.urgency, order)
