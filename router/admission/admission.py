"""Which requests go to their workers now, which wait in the router, and which are refused. Pure: the clock comes in.

A request that is dispatched cannot be overtaken any more, nor sent elsewhere. So a worker is given only as much work
ahead as it needs never to run dry (see `headroom`); the rest is held here, where urgent ones pass (see `turns`) and
each is decided anew when its turn comes (late binding). A held request keeps a reservation on whom it would go to now,
so that others count with it. One whose first token is predicted to come after its limit is refused at once.

Life of a request here: `enter` says at once that it goes or is refused, or holds it; `wake` says later of held ones
what has become of them. `first_token` and `leave` tell when it is out of the way of others.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping

from router.admission.capacity import Free, Headroom
from router.admission.fair_queue import Turn, Turns
from router.admission.fairness import Fairness
from router.admission.false_rejections import Ghosts
from router.admission.queued_request import (
    Held,
    Reason,
    Refused,
    Released,
    Rules,
    Stranded,
    Verdict,
    Wanting,
    Workers,
    add_shares,
    urgency,
)
from router.routing.reservations import Reservations
from router.routing.selector import Selector
from twostroke.ids import RequestId, WorkerId

HEADS = 16
"""Held requests looked at per wake, however many there are."""
SCANNED = 256
"""Where a worker has time that held requests would go to: as many are asked whether they are those."""
MOST_DECIDED = 4
"""Verdicts and prices per wake, and the rest in the next one: among 64 workers a decision takes most of a millisecond,
and tokens of other streams wait for the end of a wake."""
MOST_RECONSIDERED = 2
"""Of those whose worker is busy, how many are priced again in vain because another worker has time,"""
RECONSIDER_S = 0.05
"""at most this often: prices of busy workers change with their queues, which are seconds long."""
NOTED_AHEAD = 64
"""Of held requests that go before a refused one, those that came last are enough to know when it would have run."""
STALE_SPARED = 64
"""Entries about requests that went long before their limits, besides as many as are held, before those are swept out.
"""
SHORTEST_WAIT_S = 0.001
"""Until the next wake without news: predictions are not finer."""


class Admission:
    """Of one router, or of one simulated one."""

    def __init__(self, rules: Rules, selector: Selector, reservations: Reservations) -> None:
        self.ghosts = Ghosts()
        self.headroom = Headroom(selector, reservations, rules.lone_ahead_s)
        self._rules = rules
        self._selector = selector
        self._reservations = reservations
        self._turns = Turns()
        self._fairness = Fairness()
        self._held: dict[RequestId, Held] = {}
        self._sent: dict[RequestId, Released] = {}
        """What has no first token yet."""
        self._reserved_s: dict[int, dict[WorkerId, float]] = {}
        """For held requests, by class and worker."""
        self._claims: Counter[WorkerId] = Counter()
        """How many held requests each would compute."""
        self._late: list[tuple[float, int, RequestId]] = []
        """By latest start; those that are held no longer, or decided anew, are passed over."""
        self._order = itertools.count()
        self._displaced: list[Verdict] = []
        """To be told by the next wake."""
        self._reconsidered_at_s = -math.inf
        self._wake_at_s: float | None = None

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def wake_at_s(self) -> float | None:
        """When `wake` is worth a call without any news; None: only news can change anything."""
        return min((at_s for at_s in (self._wake_at_s, self._next_late_s()) if at_s is not None), default=None)

    def fairness(self, now_s: float) -> float:
        """Jain's index over tenants."""
        return self._fairness.index(self._turns.held_by_tenant(), now_s)

    def enter(self, wanting: Wanting, workers: Workers, now_s: float) -> Released | Refused | None:
        """None: it is held, and `wake` is due. There has to be a decode worker."""
        displaced, wanting = None, self.headroom.to_answer_in_time(wanting, workers, now_s)
        if len(self._held) >= self._rules.most_held and not wanting.is_urgent:
            displaced = self._turns.displaced_by(self._turn(wanting, 0.0))
            if displaced is None:
                self._fairness.refused(wanting.tenant, self._turns.quantum_s, now_s)
                return Refused(wanting.ask.request_id, Reason.QUEUE_FULL)
        self.headroom.claimants.ask(wanting, now_s)
        held = self._decide(wanting, workers, self._passed_by(wanting), now_s)
        if wanting.is_urgent:
            return self._release(held, workers, now_s)
        first_token_at_s = now_s + held.decision.forecast.foreseen_s
        if self._is_late(held, first_token_at_s):
            return self._refuse(held, first_token_at_s, now_s)
        if not self._rules.holds or (not self._held and self._may_go(held, workers, now_s)):
            return self._release(held, workers, now_s)
        if displaced is not None:
            self._displace(self._held[displaced], now_s)
        self._hold(held)
        self._turns.add(self._turn(wanting, self.headroom.cost_s(wanting, held.decision, workers)))
        self._wake_at_s = now_s
        return None

    def wake(self, workers: Workers, now_s: float) -> list[Verdict]:
        """What has become of held requests. To be called on news of workers, and at `wake_at_s`."""
        for member in workers.everyone.values():
            if member.worker in self.ghosts.workers and not member.load.queued_s:
                self.ghosts.drained(member.worker, now_s)
        verdicts, self._displaced, self._wake_at_s = self._displaced, [], None
        if self._held and not workers.decode:
            return [*verdicts, *(self._strand(request_id, now_s) for request_id in list(self._held))]
        verdicts += self._refuse_late(workers, now_s)
        if self._held:
            verdicts += self._take_turns(workers, now_s)
            if self._wake_at_s is None:
                self._wake_at_s = self._next_free_s(workers, now_s)
        return verdicts

    def first_token(self, request_id: RequestId, now_s: float) -> bool:
        """It has one: whoever computed its prompt is done with it. False where that was known."""
        if not self.headroom.done(request_id):
            return False
        sent = self._sent.pop(request_id)
        self._selector.had_first_token(sent.decision, now_s - sent.decided_at_s, now_s)
        self._reservations.end(request_id)
        self.ghosts.gone(request_id, now_s)
        return True

    def leave(self, request_id: RequestId, now_s: float) -> None:
        """It is over, or its client is gone, wherever it stands."""
        if request_id in self._held:
            self._unhold(self._held[request_id])
            self._turns.remove(request_id)
        self.headroom.ended(request_id)
        self._sent.pop(request_id, None)
        self._reservations.end(request_id)
        self.ghosts.gone(request_id, now_s)

    def _take_turns(self, workers: Workers, now_s: float) -> Iterator[Verdict]:
        """The next ones in order go, as far as those who would compute them have time; one that has to wait does not
        stop those behind it who would go elsewhere. Whoever was let in is refused only if nothing but what workers
        say that they have to do makes it late: what was just sent may be in that already."""
        free = self.headroom.free(workers, now_s)
        before_s: dict[WorkerId, float] = {}
        """Reserved for those before, that stay."""
        decided, stay = 0, list[Held]()
        for held in self._heads(free):
            if decided == MOST_DECIDED:
                self._wake_at_s = now_s
                return
            goes = self._has_time(held, workers, free)
            if not workers.can_serve(held.decision) or (goes and self._may_reconsider(held, now_s)):
                decided += 1
                verdict = self._try_anew(held, workers, before_s, free, now_s)
            else:
                decided += goes
                verdict = self._release_there(held, workers, free, now_s) if goes else None
            if verdict is not None:
                yield verdict
                continue
            stays = self._held[held.request_id]
            stay.append(stays)
            add_shares(before_s, stays.shares_s, 1)
        yield from self._fill_idle(stay[:HEADS], workers, free, now_s)

    def _fill_idle(self, stay: list[Held], workers: Workers, free: Free, now_s: float) -> Iterator[Verdict]:
        """Workers that nobody goes to: those who would wait longest where they would go may want to. The first in
        order would not: their turn is near, and what waits behind them is nothing to them."""
        if not free.computing or now_s < self._reconsidered_at_s + RECONSIDER_S:
            return
        before_s: dict[WorkerId, float] = {}
        for held in stay:
            add_shares(before_s, held.shares_s, 1)
        failed = decided = 0
        for held in reversed(stay):
            add_shares(before_s, held.shares_s, -1)
            if failed == MOST_RECONSIDERED or decided == MOST_DECIDED or not free.computing:
                return
            if not self._may_reconsider(held, now_s - 2 * RECONSIDER_S):
                continue
            decided += 1
            verdict = self._try_anew(held, workers, before_s, free, now_s)
            if verdict is None:
                failed, self._reconsidered_at_s = failed + 1, now_s
            else:
                yield verdict

    def _try_anew(
        self, head: Held, workers: Workers, before_s: Mapping[WorkerId, float], free: Free, now_s: float
    ) -> Verdict | None:
        held = self._decide_anew(head, workers, before_s, now_s)
        soonest_s = now_s + workers.everyone[held.computer].queue_s(now_s) + held.decision.forecast.own_s
        if self._is_late(held, soonest_s):
            return self._refuse(held, soonest_s, now_s)
        return self._release_there(held, workers, free, now_s) if self._has_time(held, workers, free) else None

    def _release_there(self, held: Held, workers: Workers, free: Free, now_s: float) -> Released:
        released = self._release(held, workers, now_s)
        free.room[held.decision.decode] -= 1
        if not self.headroom.has_time(workers.everyone[held.computer], now_s):
            free.computing.discard(held.computer)
        return released

    def _heads(self, free: Free) -> list[Held]:
        """The next few in order; and where a worker has time that others would go to, enough to find those."""
        if not free.computing:
            return []
        count = HEADS if free.computing.isdisjoint(self._claims) else SCANNED
        return [self._held[request_id] for request_id in self._turns.first(count)]

    def _may_go(self, held: Held, workers: Workers, now_s: float) -> bool:
        computer, decode = workers.everyone.get(held.computer), workers.everyone.get(held.decision.decode)
        assert computer is not None, "decided just now"
        assert decode is not None, "decided just now"
        computing = {held.computer} if self.headroom.has_time(computer, now_s) else set()
        return self._has_time(held, workers, Free(computing, {decode.worker: self.headroom.room(decode)}))

    def _may_reconsider(self, held: Held, before_s: float) -> bool:
        """It was not decided just now."""
        return self._rules.reconsiders and held.decided_at_s < before_s

    def _has_time(self, held: Held, workers: Workers, free: Free) -> bool:
        decode = workers.everyone.get(held.decision.decode)
        if held.computer not in free.computing or decode is None or free.room.get(decode.worker, -1) < 0:
            return False
        return self.headroom.has_slot(decode, held.wanting)

    def _decide(self, wanting: Wanting, workers: Workers, passes_s: Mapping[WorkerId, float], now_s: float) -> Held:
        """Reserved for it, whatever becomes of it."""
        ask = dataclasses.replace(wanting.ask, passes_s=passes_s, is_tentative=True)
        decision = self._selector.select(ask, workers.shape, workers.decode, workers.prefill, now_s)
        computer, limit_s = decision.source or decision.decode, self._limit_s(wanting)
        shares_s = {
            worker: self._reservations.own_share(ask.request_id, worker).seconds
            for worker in {computer, decision.decode}
        }
        member, latest_start_s = workers.everyone.get(computer), None
        if limit_s is not None and member is not None and self.headroom.is_trusted(member, now_s):
            latest_start_s = limit_s - decision.forecast.own_s
        return Held(wanting, limit_s, decision, shares_s, now_s, latest_start_s)

    def _decide_anew(self, before: Held, workers: Workers, before_s: Mapping[WorkerId, float], now_s: float) -> Held:
        """Its turn has come: only those looked at before it in this wake are before it."""
        self._unhold(before)
        self._reservations.end(before.request_id)
        passes_s: dict[WorkerId, float] = {}
        for reserved in self._reserved_s.values():
            for worker, seconds in reserved.items():
                passes_s[worker] = passes_s.get(worker, 0.0) + seconds
        passes_s = {worker: seconds - before_s.get(worker, 0.0) for worker, seconds in passes_s.items()}
        held = self._decide(before.wanting, workers, passes_s, now_s)
        self._hold(held)
        self._turns.reprice(held.request_id, self.headroom.cost_s(held.wanting, held.decision, workers))
        return held

    def _passed_by(self, wanting: Wanting) -> dict[WorkerId, float]:
        """Of what held requests have reserved, the part that this one would go before."""
        passed_s: dict[WorkerId, float] = {}
        for priority, reserved in self._reserved_s.items():
            before = 0.0 if wanting.is_urgent or priority < wanting.priority else 1.0
            if before and priority == wanting.priority:
                before = self._turns.share_before(self._turn(wanting, 0.0))
            for worker, seconds in reserved.items():
                passed_s[worker] = passed_s.get(worker, 0.0) + (1 - before) * seconds
        return passed_s

    def _refuse_late(self, workers: Workers, now_s: float) -> list[Verdict]:
        """Held ones that can no longer make it, even if they went now."""
        verdicts: list[Verdict] = []
        while len(verdicts) < MOST_DECIDED:
            latest_start_s = self._next_late_s()
            if latest_start_s is None or latest_start_s > now_s:
                break
            held = self._held[heapq.heappop(self._late)[2]]
            verdicts.append(self._refuse(held, self._first_token_at_s(held, workers, now_s), now_s))
        return verdicts

    def _next_late_s(self) -> float | None:
        while self._late:
            latest_start_s, _, request_id = self._late[0]
            held = self._held.get(request_id)
            if held is not None and held.latest_start_s == latest_start_s:
                return latest_start_s
            heapq.heappop(self._late)
        return None

    def _first_token_at_s(self, held: Held, workers: Workers, now_s: float) -> float:
        """With everything that goes before it."""
        computer = workers.everyone.get(held.computer)
        wait_s = 0.0 if computer is None else self.headroom.queue_s(computer, now_s)
        for priority, reserved in self._reserved_s.items():
            if priority == held.wanting.priority:
                wait_s += reserved.get(held.computer, 0.0) * self._turns.share_before(self._turn(held.wanting, 0.0))
            elif priority > held.wanting.priority:
                wait_s += reserved.get(held.computer, 0.0)
        return now_s + wait_s + held.decision.forecast.own_s

    def _is_late(self, held: Held, first_token_at_s: float) -> bool:
        """Nobody is, where the worker has not shown yet how fast it is."""
        return held.latest_start_s is not None and held.limit_s is not None and first_token_at_s > held.limit_s

    def _refuse(self, held: Held, first_token_at_s: float, now_s: float) -> Refused:
        assert held.limit_s is not None
        assert held.latest_start_s is not None
        wanting, request_id = held.wanting, held.request_id
        ahead = list(self._ahead_of(held))
        self.leave(request_id, now_s)
        self.ghosts.add(held.computer, held.latest_start_s, ahead, now_s)
        self._fairness.refused(wanting.tenant, held.decision.forecast.prefill_s, now_s)
        reason = Reason.DEADLINE if held.limit_s == wanting.deadline_s else Reason.SLO
        return Refused(request_id, reason, first_token_at_s - now_s, first_token_at_s - held.limit_s)

    def _ahead_of(self, refused: Held) -> Iterator[RequestId]:
        """What would have run before it there."""
        yield from self.headroom.sent_to(refused.computer)
        mine = refused.wanting
        noted = 0
        for held in itertools.islice(reversed(self._held.values()), HEADS * NOTED_AHEAD):
            other = held.wanting
            is_urgent = other.tenant != mine.tenant or urgency(held) <= urgency(refused)
            is_before = other.priority > mine.priority or (other.priority == mine.priority and is_urgent)
            if held.computer == refused.computer and held is not refused and is_before:
                yield held.request_id
                noted += 1
            if noted == NOTED_AHEAD:
                return

    def _release(self, held: Held, workers: Workers, now_s: float) -> Released:
        if held.request_id in self._held:
            self._unhold(held)
            self._turns.serve(held.request_id)
        self.headroom.sent(held.wanting, held.decision)
        self._sent[held.request_id] = Released(held.request_id, held.decision, held.decided_at_s)
        self._selector.dispatched(held.decision, workers.shape, [*workers.everyone.values()], now_s)
        self._fairness.served(held.wanting.tenant, held.decision.forecast.prefill_s, now_s)
        return self._sent[held.request_id]

    def _displace(self, held: Held, now_s: float) -> None:
        """The queue is full, and its place is due to somebody else."""
        self.leave(held.request_id, now_s)
        self._fairness.refused(held.wanting.tenant, held.decision.forecast.prefill_s, now_s)
        self._displaced.append(Refused(held.request_id, Reason.QUEUE_FULL))

    def _strand(self, request_id: RequestId, now_s: float) -> Stranded:
        self.leave(request_id, now_s)
        return Stranded(request_id)

    def _hold(self, held: Held) -> None:
        self._held[held.request_id] = held
        reserved = self._reserved_s.setdefault(held.wanting.priority, {})
        for worker, seconds in held.shares_s.items():
            reserved[worker] = reserved.get(worker, 0.0) + seconds
        self._claims[held.computer] += 1
        if held.latest_start_s is not None:
            heapq.heappush(self._late, (held.latest_start_s, next(self._order), held.request_id))
        if len(self._late) > 2 * len(self._held) + STALE_SPARED:
            limited = ((each.latest_start_s, each.request_id) for each in self._held.values())
            self._late = [(at_s, next(self._order), name) for at_s, name in limited if at_s is not None]
            heapq.heapify(self._late)

    def _unhold(self, held: Held) -> None:
        del self._held[held.request_id]
        reserved = self._reserved_s[held.wanting.priority]
        for worker, seconds in held.shares_s.items():
            reserved[worker] -= seconds
        self._claims[held.computer] -= 1
        if not self._claims[held.computer]:
            del self._claims[held.computer]
        if not self._held:
            self._reserved_s.clear()  # and with it what rounding left

    def _next_free_s(self, workers: Workers, now_s: float) -> float | None:
        free_at_s = self.headroom.next_free_s(workers, now_s)
        return None if free_at_s is None else max(free_at_s, now_s + SHORTEST_WAIT_S)

    def _limit_s(self, wanting: Wanting) -> float | None:
        slo_s = self._rules.slo_ttft_s
        if slo_s is None:
            return wanting.deadline_s
        allowed_s = wanting.arrived_s + slo_s
        return allowed_s if wanting.deadline_s is None else min(allowed_s, wanting.deadline_s)

    def _turn(self, wanting: Wanting, cost_s: float) -> Turn:
        return Turn(
            request_id=wanting.ask.request_id,
            priority=wanting.priority,
            tenant=wanting.tenant,
            limit_s=self._limit_s(wanting),
            arrived_s=wanting.arrived_s,
            cost_s=cost_s,
            siblings_before=wanting.siblings.before,
        )
