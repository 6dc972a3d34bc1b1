"""Decides which requests go to their workers now, which are queued, and which are refused. Time is passed in.

A request that was sent to a worker can neither be overtaken nor sent to another one. So a worker gets only as much
work ahead as keeps it busy (see `capacity`). Other requests are queued here, where urgent ones go first (see
`fair_queue`), and each is routed again when its turn comes (late binding). A queued request keeps a reservation on the
workers to which it would go now, so that others count it. A request is refused when its first token is predicted to
come after its limit.

`enter` returns at once whether a request goes or is refused, or else queues it. `wake` returns verdicts on queued ones.
Call `first_token` and `leave` when a request delays others no more.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from router.admission.capacity import Capacity, Free
from router.admission.fair_queue import FairQueue
from router.admission.measures import Fairness, FalseRejections
from router.admission.queued_request import Placement, QueuedRequest, Reason, Refused, Rules, Stranded, Verdict
from router.routing.reservations import Reservations
from router.routing.selector import Selector, Workers
from twostroke.base.ids import RequestId, WorkerId

HEADS = 16
"""Most queued requests that a wake looks at."""
SCANNED = 256
"""Most queued requests that a wake looks at if a free worker would compute some of the queue: enough to find those."""
MOST_DECIDED = 4
"""Most verdicts and decisions in a wake; others follow in the next one. Among 64 workers, a decision takes most of a
millisecond, and tokens of all streams wait until the wake ends."""
MOST_RECONSIDERED = 2
"""Requests that may be routed again in vain in a wake because another worker than theirs has time."""
RECONSIDER_S = 0.05
"""Seconds between two such attempts. Prices of busy workers change slowly: their queues are seconds long."""
NOTED_AHEAD = 64
"""Most queued requests that are noted as ahead of a refused one. The latest show when it would have run."""
STALE_SPARED = 64
"""Stale entries of `_late` that are kept, besides one for each queued request."""
SHORTEST_WAIT_S = 0.001
"""Shortest time until the next wake, in seconds: predictions are not more exact."""


class Admission:
    """Admission of one router, real or simulated."""

    def __init__(self, rules: Rules, selector: Selector, reservations: Reservations) -> None:
        self.false_rejections = FalseRejections()
        self.capacity = Capacity(selector, reservations, rules.lone_ahead_s)
        self._rules = rules
        self._selector = selector
        self._reservations = reservations
        self._queue = FairQueue()
        self._fairness = Fairness()
        self._queued: dict[RequestId, Placement] = {}
        self._reserved_s: dict[int, dict[WorkerId, float]] = {}
        """Seconds that are reserved for queued requests, by class and worker."""
        self._computed_by: Counter[WorkerId] = Counter()
        """Number of queued requests that each worker would compute."""
        self._late: list[tuple[float, int, RequestId]] = []
        """Heap of (latest start, order, request). Entries of requests that left or were routed again are skipped."""
        self._order = itertools.count()
        self._displaced: list[Verdict] = []
        """Refusals of displaced requests, which the next wake returns."""
        self._reconsidered_at_s = -math.inf
        self._wake_at_s: float | None = None

    @property
    def queued(self) -> int:
        return len(self._queued)

    @property
    def wake_at_s(self) -> float | None:
        """When to call `wake` even if nothing has changed, in seconds. None: only after changes."""
        return min((at_s for at_s in (self._wake_at_s, self._next_late_s()) if at_s is not None), default=None)

    def fairness(self, now_s: float) -> float:
        """Returns Jain's index of how evenly tenants are served: 1 is even."""
        return self._fairness.index(self._queue.queued_s_by_tenant(), now_s)

    def enter(self, request: QueuedRequest, workers: Workers, now_s: float) -> Placement | Refused | None:
        """Returns the verdict. None: the request is queued, and `wake` is due. `workers` need a decode worker."""
        request = self.capacity.limited(request, workers, self._rules.slo_ttft_s, now_s)
        displaced = None
        if len(self._queued) >= self._rules.most_queued and not request.is_urgent:
            displaced = self._queue.displaced_by(request)
            if displaced is None:
                self._fairness.refused(request.routing.tenant, self._queue.quantum_s, now_s)
                return Refused(request.request_id, Reason.QUEUE_FULL)
        self.capacity.tenants.arrived(request, now_s)
        placement = self._decide(request, workers, self._passed_by(request), now_s)
        if request.is_urgent:
            return self._release(placement, workers, now_s)
        first_token_at_s = now_s + placement.decision.forecast.foreseen_s
        if _is_late(placement, first_token_at_s):
            return self._refuse(placement, first_token_at_s, now_s)
        if not self._rules.queues or (not self._queued and self._may_go(placement, workers, now_s)):
            return self._release(placement, workers, now_s)
        if displaced is not None:
            self._displace(self._queued[displaced], now_s)
        self._keep(placement)
        self._queue.add(request, self.capacity.cost_s(request, placement.decision, workers))
        self._wake_at_s = now_s
        return None

    def wake(self, workers: Workers, now_s: float) -> list[Verdict]:
        """Returns verdicts on queued requests. Call it when workers have changed, and at `wake_at_s`."""
        if self.false_rejections.followed:
            self.false_rejections.look(workers.by_id, now_s)
        verdicts, self._displaced, self._wake_at_s = self._displaced, [], None
        if self._queued and not workers.decode:
            stranded = [Stranded(request_id) for request_id in self._queued]
            for each in stranded:
                self.leave(each.request_id, now_s)
            return [*verdicts, *stranded]
        verdicts += self._refuse_late(workers, now_s)
        if self._queued:
            verdicts += self._take_turns(workers, now_s)
            if self._wake_at_s is None and (free_at_s := self.capacity.next_free_s(workers, now_s)) is not None:
                self._wake_at_s = max(free_at_s, now_s + SHORTEST_WAIT_S)
        return verdicts

    def first_token(self, request_id: RequestId, now_s: float) -> bool:
        """Notes that a request's prompt is computed. Returns False if that was noted before."""
        sent = self.capacity.done(request_id)
        if sent is None:
            return False
        self._selector.had_first_token(sent.decision, now_s - sent.decided_at_s, now_s)
        self._reservations.end(request_id)
        if self.false_rejections.followed:
            self.false_rejections.gone(request_id, now_s)
        return True

    def leave(self, request_id: RequestId, now_s: float) -> None:
        """Removes a request that is over, queued or sent."""
        if request_id in self._queued:
            self._drop(self._queued[request_id])
            self._queue.remove(request_id)
        self.capacity.ended(request_id)
        self._reservations.end(request_id)
        if self.false_rejections.followed:
            self.false_rejections.gone(request_id, now_s)

    def _take_turns(self, workers: Workers, now_s: float) -> Iterator[Verdict]:
        """Releases the next requests in order if the workers that would compute them have time.

        A request that has to wait does not stop later ones that would go to other workers. A request is refused here
        only if the reported queues make it late: what was just sent may be part of these already.
        """
        free = self.capacity.free(workers, now_s)
        before_s: dict[WorkerId, float] = {}
        """Seconds that are reserved for earlier requests of this wake, which stay queued."""
        decided, stay = 0, list[Placement]()
        for head in self._heads(free):
            if decided == MOST_DECIDED:
                self._wake_at_s = now_s
                return
            goes = self._has_time(head, workers, free)
            if not workers.can_serve(head.decision) or (goes and self._may_reconsider(head, now_s)):
                decided += 1
                verdict = self._try_anew(head, workers, before_s, free, now_s)
            else:
                decided += goes
                verdict = self._release_there(head, workers, free, now_s) if goes else None
            if verdict is not None:
                yield verdict
                continue
            stays = self._queued[head.request_id]
            stay.append(stays)
            _add(before_s, stays.shares_s, 1)
        yield from self._fill_idle(stay[:HEADS], workers, free, now_s)

    def _fill_idle(self, stay: list[Placement], workers: Workers, free: Free, now_s: float) -> Iterator[Verdict]:
        """Routes the last requests that stay again, since free workers are left.

        The first in order would hardly gain by that: their own workers are soon free.
        """
        if not free.computing or now_s < self._reconsidered_at_s + RECONSIDER_S:
            return
        before_s: dict[WorkerId, float] = {}
        for placement in stay:
            _add(before_s, placement.shares_s, 1)
        failed = decided = 0
        for placement in reversed(stay):
            _add(before_s, placement.shares_s, -1)
            if failed == MOST_RECONSIDERED or decided == MOST_DECIDED or not free.computing:
                return
            if not self._may_reconsider(placement, now_s - 2 * RECONSIDER_S):
                continue
            decided += 1
            verdict = self._try_anew(placement, workers, before_s, free, now_s)
            if verdict is None:
                failed, self._reconsidered_at_s = failed + 1, now_s
            else:
                yield verdict

    def _try_anew(
        self, head: Placement, workers: Workers, before_s: Mapping[WorkerId, float], free: Free, now_s: float
    ) -> Verdict | None:
        placement = self._decide_anew(head, workers, before_s, now_s)
        queue_s = workers.by_id[placement.computed_by].queue_s(now_s)
        soonest_s = now_s + queue_s + placement.decision.forecast.own_s
        if _is_late(placement, soonest_s):
            return self._refuse(placement, soonest_s, now_s)
        if not self._has_time(placement, workers, free):
            return None
        return self._release_there(placement, workers, free, now_s)

    def _release_there(self, placement: Placement, workers: Workers, free: Free, now_s: float) -> Placement:
        released = self._release(placement, workers, now_s)
        free.room[placement.decision.decode] -= 1
        if not self.capacity.has_time(workers.by_id[placement.computed_by], now_s):
            free.computing.discard(placement.computed_by)
        return released

    def _heads(self, free: Free) -> list[Placement]:
        """Returns the next few requests in order, or more if free workers would compute some of the queue."""
        if not free.computing:
            return []
        count = HEADS if free.computing.isdisjoint(self._computed_by) else SCANNED
        return [self._queued[request_id] for request_id in self._queue.first(count)]

    def _may_go(self, placement: Placement, workers: Workers, now_s: float) -> bool:
        computed_by, decode = placement.computed_by, workers.by_id[placement.decision.decode]
        computing = {computed_by} if self.capacity.has_time(workers.by_id[computed_by], now_s) else set[WorkerId]()
        return self._has_time(placement, workers, Free(computing, {decode.worker_id: self.capacity.room(decode)}))

    def _may_reconsider(self, placement: Placement, before_s: float) -> bool:
        """Returns whether the request may be routed again: its last decision is older than `before_s`."""
        return self._rules.reconsiders and placement.decided_at_s < before_s

    def _has_time(self, placement: Placement, workers: Workers, free: Free) -> bool:
        decode = workers.by_id.get(placement.decision.decode)
        if placement.computed_by not in free.computing or decode is None or free.room.get(decode.worker_id, -1) < 0:
            return False
        return self.capacity.has_slot(decode, placement.request)

    def _decide(
        self, request: QueuedRequest, workers: Workers, passes_s: Mapping[WorkerId, float], now_s: float
    ) -> Placement:
        """Chooses workers, and reserves them for the request, even if it will be queued or refused."""
        decision = self._selector.select(request, workers, now_s, passes_s=passes_s, is_tentative=True)
        shares_s = {
            worker: self._reservations.own_share(request.request_id, worker).seconds
            for worker in {decision.computed_by, decision.decode}
        }
        worker, latest_start_s = workers.by_id.get(decision.computed_by), None
        if request.limit_s is not None and worker is not None and self.capacity.is_trusted(worker, now_s):
            latest_start_s = request.limit_s - decision.forecast.own_s
        return Placement(request, decision, now_s, shares_s, latest_start_s)

    def _decide_anew(
        self, before: Placement, workers: Workers, before_s: Mapping[WorkerId, float], now_s: float
    ) -> Placement:
        """Routes a queued request again, as if only the earlier requests of this wake (`before_s`) were ahead of it."""
        self._drop(before)
        self._reservations.end(before.request_id)
        passes_s: dict[WorkerId, float] = {}
        for reserved in self._reserved_s.values():
            _add(passes_s, reserved, 1)
        passes_s = {worker: seconds - before_s.get(worker, 0.0) for worker, seconds in passes_s.items()}
        placement = self._decide(before.request, workers, passes_s, now_s)
        self._keep(placement)
        self._queue.reprice(placement.request_id, self.capacity.cost_s(before.request, placement.decision, workers))
        return placement

    def _passed_by(self, request: QueuedRequest) -> dict[WorkerId, float]:
        """Returns the reserved seconds of queued requests that this request would overtake, by worker."""
        passed_s: dict[WorkerId, float] = {}
        for priority, reserved in self._reserved_s.items():
            before = 0.0 if request.is_urgent or priority < request.routing.priority else 1.0
            if before and priority == request.routing.priority:
                before = self._queue.share_before(request)
            _add(passed_s, reserved, 1 - before)
        return passed_s

    def _refuse_late(self, workers: Workers, now_s: float) -> list[Verdict]:
        """Refuses queued requests whose latest start has passed."""
        verdicts: list[Verdict] = []
        while len(verdicts) < MOST_DECIDED:
            latest_start_s = self._next_late_s()
            if latest_start_s is None or latest_start_s > now_s:
                break
            placement = self._queued[heapq.heappop(self._late)[2]]
            verdicts.append(self._refuse(placement, self._first_token_at_s(placement, workers, now_s), now_s))
        return verdicts

    def _next_late_s(self) -> float | None:
        while self._late:
            latest_start_s, _, request_id = self._late[0]
            placement = self._queued.get(request_id)
            if placement is not None and placement.latest_start_s == latest_start_s:
                return latest_start_s
            heapq.heappop(self._late)
        return None

    def _first_token_at_s(self, placement: Placement, workers: Workers, now_s: float) -> float:
        """Predicts when the first token would come, after all requests that are before this one."""
        request, computed_by = placement.request, placement.computed_by
        worker = workers.by_id.get(computed_by)
        wait_s = 0.0 if worker is None else self.capacity.queue_s(worker, now_s)
        for priority, reserved in self._reserved_s.items():
            if priority == request.routing.priority:
                wait_s += reserved.get(computed_by, 0.0) * self._queue.share_before(request)
            elif priority > request.routing.priority:
                wait_s += reserved.get(computed_by, 0.0)
        return now_s + wait_s + placement.decision.forecast.own_s

    def _refuse(self, placement: Placement, first_token_at_s: float, now_s: float) -> Refused:
        request, latest_start_s = placement.request, placement.latest_start_s
        assert request.limit_s is not None
        assert latest_start_s is not None
        ahead = list(self._ahead_of(placement))
        self.leave(request.request_id, now_s)
        self.false_rejections.add(placement.computed_by, latest_start_s, ahead, now_s)
        self._fairness.refused(request.routing.tenant, placement.decision.forecast.prefill_s, now_s)
        reason = Reason.DEADLINE if request.limit_s == request.deadline_s else Reason.SLO
        return Refused(request.request_id, reason, first_token_at_s - now_s, first_token_at_s - request.limit_s)

    def _ahead_of(self, refused: Placement) -> Iterator[RequestId]:
        """Yields requests that would have run on its worker before a refused request."""
        yield from self.capacity.sent_to(refused.computed_by)
        latest: Iterable[Placement] = itertools.islice(reversed(self._queued.values()), HEADS * NOTED_AHEAD)
        before = (
            placement.request_id
            for placement in latest
            if placement.computed_by == refused.computed_by
            and placement is not refused
            and _goes_before(placement.request, refused.request)
        )
        yield from itertools.islice(before, NOTED_AHEAD)

    def _release(self, placement: Placement, workers: Workers, now_s: float) -> Placement:
        request_id = placement.request_id
        if request_id in self._queued:
            self._drop(placement)
            self._queue.serve(request_id)
        self.capacity.sent(placement)
        self._selector.dispatched(placement.request, placement.decision, workers, now_s)
        self._fairness.served(placement.request.routing.tenant, placement.decision.forecast.prefill_s, now_s)
        return placement

    def _displace(self, placement: Placement, now_s: float) -> None:
        """Refuses a queued request: the queue is full, and its place goes to another request."""
        self.leave(placement.request_id, now_s)
        self._fairness.refused(placement.request.routing.tenant, placement.decision.forecast.prefill_s, now_s)
        self._displaced.append(Refused(placement.request_id, Reason.QUEUE_FULL))

    def _keep(self, placement: Placement) -> None:
        self._queued[placement.request_id] = placement
        _add(self._reserved_s.setdefault(placement.request.routing.priority, {}), placement.shares_s, 1)
        self._computed_by[placement.computed_by] += 1
        if placement.latest_start_s is not None:
            heapq.heappush(self._late, (placement.latest_start_s, next(self._order), placement.request_id))
        if len(self._late) > 2 * len(self._queued) + STALE_SPARED:
            limited = ((each.latest_start_s, each.request_id) for each in self._queued.values())
            self._late = [(at_s, next(self._order), name) for at_s, name in limited if at_s is not None]
            heapq.heapify(self._late)

    def _drop(self, placement: Placement) -> None:
        del self._queued[placement.request_id]
        _add(self._reserved_s[placement.request.routing.priority], placement.shares_s, -1)
        self._computed_by[placement.computed_by] -= 1
        if not self._computed_by[placement.computed_by]:
            del self._computed_by[placement.computed_by]
        if not self._queued:
            self._reserved_s.clear()  # drops rounding errors


def _is_late(placement: Placement, first_token_at_s: float) -> bool:
    """Returns whether the limit would be missed. It is False while the worker's speed is not trusted."""
    limit_s = placement.request.limit_s
    return placement.latest_start_s is not None and limit_s is not None and first_token_at_s > limit_s


def _goes_before(one: QueuedRequest, other: QueuedRequest) -> bool:
    if one.routing.priority != other.routing.priority:
        return one.routing.priority > other.routing.priority
    return one.routing.tenant != other.routing.tenant or one.urgency <= other.urgency


def _add(total_s: dict[WorkerId, float], shares_s: Mapping[WorkerId, float], factor: float) -> None:
    for worker, seconds in shares_s.items():
        total_s[worker] = total_s.get(worker, 0.0) + factor * seconds
