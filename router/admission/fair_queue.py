"""In which order held requests go: classes strictly, tenants of a class in turns, a tenant's own by urgency. Pure.

Tenants of a class take turns by deficit round robin (Shreedhar and Varghese, SIGCOMM 1995), in the form that lets the
last request of a turn overdraw and pays for it in the next one (surplus round robin; Adiseshu, Parulkar and Varghese,
SIGCOMM 1996). Rounds are kept as the seconds that a tenant has had, so that an expensive request does not cost as many
empty rounds as it is worth quanta, and looking at the next few costs the same however many wait. A tenant's own
requests go earliest limit first (EDF); later answers of a request that wants many let others pass.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from twostroke.ids import RequestId

COST_MEMORY = 0.05
"""Weight of the latest cost in the quantum: the mean of the last twenty or so."""
MOST_CREDIT_QUANTA = 4
"""Turns that a tenant could not use (whom it was placed on was busy) are kept for this many rounds."""
LEAST_COST_S = 1e-4
"""Nothing is free: turns of cost zero would never end."""

STALE_SPARED = 64
"""Entries of tenants that moved on or left, besides as many as wait, before those are swept out of a class's heap."""

MOST_OVERDRAWN = 2048
"""Tenants of a class without anything waiting that are remembered; beyond, those are forgotten that have had least."""

SIBLINGS_AT_ONCE = 16
"""Answers of one client request that go as if they were requests of their own. The next so many let those of others
pass, and so on."""

_Rank = tuple[int, float, float, float]
"""Among a tenant's own: so many times `SIBLINGS_AT_ONCE` siblings before it, limit, arrival, order of coming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One held request as far as its turn depends on it."""

    request_id: RequestId
    priority: int
    """Higher goes first."""
    tenant: str
    limit_s: float | None
    """When its first token has to be there."""
    arrived_s: float
    cost_s: float
    """Predicted, of its own prompt and of the tokens of its answer."""
    siblings_before: int = 0
    """Answers of the same client request that come before it."""

    def rank(self, order: float) -> _Rank:
        limit_s = math.inf if self.limit_s is None else self.limit_s
        return (self.siblings_before // SIBLINGS_AT_ONCE, limit_s, self.arrived_s, order)


@dataclass(slots=True)
class _Waiting:
    turn: Turn
    rank: _Rank
    cost_s: float


@dataclass(slots=True)
class _Tenant:
    had_s: float
    """What it has been given; a newcomer begins where the class stands, and who comes again with what it had."""
    ranks: list[_Rank] = field(default_factory=list)
    """Sorted."""
    waiting: dict[_Rank, _Waiting] = field(default_factory=dict)
    held_s: float = 0.0
    key: tuple[float, int] | None = None
    """Its valid entry in the class's heap: begin of its round, order of coming into it."""


@dataclass(slots=True)
class _Class:
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    heap: list[tuple[float, int, str]] = field(default_factory=list)
    stands_at_s: float = 0.0
    """Begin of the latest round of which somebody was served."""
    held_s: float = 0.0
    overdrawn_s: dict[str, float] = field(default_factory=dict)
    """By tenant that has nothing waiting, what it has been given beyond where the class stands."""

    def level_s(self, name: str) -> float:
        """Where a tenant begins: to keep a single request waiting is no way to a turn in every round."""
        return max(self.stands_at_s, self.overdrawn_s.get(name, 0.0))

    def leave(self, name: str) -> None:
        """The tenant has nothing waiting any more."""
        had_s = self.tenants.pop(name).had_s
        if had_s > self.stands_at_s:
            self.overdrawn_s[name] = had_s
        if len(self.overdrawn_s) > MOST_OVERDRAWN:
            largest = sorted(self.overdrawn_s.items(), key=lambda entry: entry[1], reverse=True)[: MOST_OVERDRAWN // 2]
            self.overdrawn_s = {each: had_s for each, had_s in largest if had_s > self.stands_at_s}


class Turns:
    def __init__(self) -> None:
        self.quantum_s = LEAST_COST_S
        """What a tenant gets per round: the mean cost of recent requests."""
        self._has_quantum = False
        self._classes: dict[int, _Class] = {}
        self._waiting: dict[RequestId, _Waiting] = {}
        self._held: Counter[str] = Counter()
        """How many each tenant has waiting, in all classes; only those that have any."""
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._waiting)

    def add(self, turn: Turn) -> None:
        """It waits from now on."""
        kind = self._classes.setdefault(turn.priority, _Class())
        tenant = kind.tenants.get(turn.tenant)
        if tenant is None:
            tenant = kind.tenants[turn.tenant] = _Tenant(kind.level_s(turn.tenant))
            self._queue(kind, turn.tenant, tenant)
        rank = turn.rank(next(self._order))
        waiting = _Waiting(turn, rank, max(LEAST_COST_S, turn.cost_s))
        bisect.insort(tenant.ranks, rank)
        tenant.waiting[rank] = self._waiting[turn.request_id] = waiting
        self._held[turn.tenant] += 1
        self._weigh(kind, tenant, waiting.cost_s)

    def reprice(self, request_id: RequestId, cost_s: float) -> None:
        """It would go elsewhere now, and cost this."""
        waiting = self._waiting[request_id]
        kind = self._classes[waiting.turn.priority]
        cost_s = max(LEAST_COST_S, cost_s)
        self._weigh(kind, kind.tenants[waiting.turn.tenant], cost_s - waiting.cost_s)
        waiting.cost_s = cost_s

    def serve(self, request_id: RequestId) -> None:
        """It goes, and its tenant pays."""
        waiting = self._waiting[request_id]
        kind = self._classes[waiting.turn.priority]
        tenant = kind.tenants[waiting.turn.tenant]
        assert tenant.key is not None, "whoever waits is in a round"
        kind.stands_at_s = max(kind.stands_at_s, tenant.key[0])
        least_s = kind.stands_at_s - MOST_CREDIT_QUANTA * self.quantum_s
        tenant.had_s = max(tenant.had_s, least_s) + waiting.cost_s
        weight = COST_MEMORY if self._has_quantum else 1.0
        self._has_quantum = True
        self.quantum_s += weight * (waiting.cost_s - self.quantum_s)
        self._queue(kind, waiting.turn.tenant, tenant)
        self.remove(request_id)

    def remove(self, request_id: RequestId) -> None:
        """It waits no longer, and nobody pays."""
        waiting = self._waiting.pop(request_id)
        kind = self._classes[waiting.turn.priority]
        tenant = kind.tenants[waiting.turn.tenant]
        del tenant.ranks[bisect.bisect_left(tenant.ranks, waiting.rank)]
        del tenant.waiting[waiting.rank]
        self._weigh(kind, tenant, -waiting.cost_s)
        self._held[waiting.turn.tenant] -= 1
        if not self._held[waiting.turn.tenant]:
            del self._held[waiting.turn.tenant]
        if not tenant.ranks:
            kind.leave(waiting.turn.tenant)
        if not kind.tenants:
            del self._classes[waiting.turn.priority]

    def first(self, count: int) -> list[RequestId]:
        """The next ones in order, if each could go; nothing changes."""
        found: list[RequestId] = []
        for priority in sorted(self._classes, reverse=True):
            found += self._first_of(self._classes[priority], count - len(found))
            if len(found) == count:
                break
        return found

    def displaced_by(self, turn: Turn) -> RequestId | None:
        """The request that leaves where there is no room for both; None: `turn` itself does.

        Every tenant has an equal share of the room. One that holds less than its share takes the place of a request of
        a tenant that holds more than its own, whatever their classes: of the lowest class in which such a tenant waits
        its largest one there, and of that one's requests the least urgent. One that holds its share takes the place of
        its own, if it has any in a lower class: a class is no way to more room.
        """
        own = self._held[turn.tenant]
        share = len(self._waiting) / (len(self._held) + (own == 0))
        if own + 1 > share:
            return self._least_urgent_below(turn)
        for priority in sorted(self._classes):
            tenants = self._classes[priority].tenants
            larger = [name for name in tenants if self._held[name] > share]
            if larger:
                largest = max(larger, key=lambda name: len(tenants[name].ranks))
                return _least_urgent(tenants[largest])
        return None

    def _least_urgent_below(self, turn: Turn) -> RequestId | None:
        """Of the tenant's own, in the lowest class that is below the turn's."""
        for priority in sorted(self._classes):
            tenant = self._classes[priority].tenants.get(turn.tenant)
            if priority < turn.priority and tenant is not None:
                return _least_urgent(tenant)
        return None

    def held_by_tenant(self) -> dict[str, float]:
        """Seconds that each tenant waits for, in all classes."""
        held: dict[str, float] = {}
        for kind in self._classes.values():
            for name, tenant in kind.tenants.items():
                held[name] = held.get(name, 0.0) + tenant.held_s
        return held

    def share_before(self, turn: Turn) -> float:
        """Of the seconds held in the turn's class, the share that goes before it: its tenant's more urgent ones, and
        of every other tenant what that one is given until then."""
        kind = self._classes.get(turn.priority)
        if kind is None or kind.held_s <= 0:
            return 0.0
        own = kind.tenants.get(turn.tenant)
        own_s, level_s = 0.0, kind.level_s(turn.tenant)
        if own is not None:
            waiting = self._waiting.get(turn.request_id)
            rank = turn.rank(math.inf) if waiting is None else waiting.rank
            position = bisect.bisect_left(own.ranks, rank)
            own_s = own.held_s * position / len(own.ranks)
            level_s = own.had_s + own_s
        others_s = sum(
            min(tenant.held_s, max(0.0, level_s + self.quantum_s - tenant.had_s))
            for tenant in kind.tenants.values()
            if tenant is not own
        )
        return min(1.0, (own_s + others_s) / kind.held_s)

    def _first_of(self, kind: _Class, count: int) -> list[RequestId]:
        found: list[RequestId] = []
        seen: list[tuple[float, int, str]] = []
        again: list[tuple[float, int, str, int, float]] = []
        """Tenants with more than their round holds: as heap entries, with how many were taken and had by then."""
        while len(found) < count:
            fresh = _valid_top(kind)
            if fresh is not None and (not again or fresh[:2] < again[0][:2]):
                seen.append(heapq.heappop(kind.heap))
                begin_s, _, name, taken, had_s = *fresh, 0, kind.tenants[fresh[2]].had_s
            elif again:
                begin_s, _, name, taken, had_s = heapq.heappop(again)
            else:
                break
            tenant = kind.tenants[name]
            while True:
                waiting = tenant.waiting[tenant.ranks[taken]]
                found.append(waiting.turn.request_id)
                taken, had_s = taken + 1, had_s + waiting.cost_s
                is_over = had_s >= begin_s + self.quantum_s
                if is_over or taken == len(tenant.ranks) or len(found) == count:
                    break
            if taken < len(tenant.ranks):
                heapq.heappush(again, (self._round(had_s), next(self._order), name, taken, had_s))
        for entry in seen:
            heapq.heappush(kind.heap, entry)
        return found

    def _queue(self, kind: _Class, name: str, tenant: _Tenant) -> None:
        """Into the round that its seconds belong to, behind those who are in it already."""
        if tenant.key is not None and tenant.had_s < tenant.key[0] + self.quantum_s:
            return
        tenant.key = (self._round(tenant.had_s), next(self._order))
        heapq.heappush(kind.heap, (*tenant.key, name))
        if len(kind.heap) > 2 * len(kind.tenants) + STALE_SPARED:
            kind.heap = [entry for entry in kind.heap if _is_valid(kind, entry)]
            heapq.heapify(kind.heap)

    def _round(self, had_s: float) -> float:
        return had_s - had_s % self.quantum_s

    def _weigh(self, kind: _Class, tenant: _Tenant, change_s: float) -> None:
        kind.held_s += change_s
        tenant.held_s += change_s


def _valid_top(kind: _Class) -> tuple[float, int, str] | None:
    """Entries of tenants that moved on, or left, are dropped here."""
    while kind.heap:
        if _is_valid(kind, kind.heap[0]):
            return kind.heap[0]
        heapq.heappop(kind.heap)
    return None


def _is_valid(kind: _Class, entry: tuple[float, int, str]) -> bool:
    tenant = kind.tenants.get(entry[2])
    return tenant is not None and tenant.key == entry[:2]


def _least_urgent(tenant: _Tenant) -> RequestId:
    return tenant.waiting[tenant.ranks[-1]].turn.request_id
