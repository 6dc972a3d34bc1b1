"""Predicts whether a worker would begin one more request now, or only queue it. Time is passed in."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from router.admission.fair_queue import SIBLINGS_AT_ONCE
from router.admission.queued_request import Placement, QueuedRequest
from router.fleet.worker import Worker
from router.routing.policy import Decision
from router.routing.reservations import REPORT_LAG_S, Reservations
from router.routing.selector import Selector, Workers
from twostroke.base.ids import RequestId, WorkerId
from twostroke.config import Role

STEPS_AHEAD = 2.0
"""Steps of work that a worker needs ahead to be never idle: the running one, and a full one after it."""
TRUSTED_S = 10.0
"""Seconds after which measured costs of an idle worker are too old to refuse a request."""
OPEN_MEMORY = 0.05
"""Weight of the latest Open in the expected duration of the next one."""
OUTPUT_MARGIN = 1.25
"""Factor on the expected seconds of an output. Without it, half of those that are sent at the limit would be late."""
MOST_OUTPUT_SHARE = 0.5
"""Largest share of the time until the deadline that counts for the output, which may be shorter than others were."""
USUAL_OPEN_S = 0.005
"""Expected seconds of an Open before the first one."""
MOST_SLOTS = 0.75
"""Share of a decode worker's slots that one tenant's requests may hold while others are active."""
MOST_ENDING = 0.25
"""Most of a worker's slots, as a share, that may be expected back while a request is on its way, if several tenants are
active. The requests that hold slots may want longer outputs than those that have ended, and other tenants would wait
for them. A single tenant waits for no other tenant, and the predicted times include what waits at the worker."""
MOST_LONE_ENDING = 0.25
"""The same bound if one tenant is active, as a share of the worker's own queue. It is not the whole queue, since other
routers send requests there, too, and a request that the worker refuses loses its place."""


REMEMBERED_S = 60.0
"""Seconds for which a tenant is active after a request: others' work must not pile up between its requests."""


class ActiveTenant(NamedTuple):
    """A tenant in one class. Its requests compete with those of others as one."""

    priority: int
    tenant: str
    siblings: int
    """Number of choices of a client request with very many: it competes as a tenant of its own. 0: other requests."""

    @classmethod
    def of(cls, request: QueuedRequest) -> ActiveTenant:
        count = request.siblings.count
        return cls(request.routing.priority, request.routing.tenant, count if count > SIBLINGS_AT_ONCE else 0)


class ActiveTenants:
    def __init__(self) -> None:
        self._arrived_at_s: dict[ActiveTenant, float] = {}
        """When each tenant's latest request arrived, in seconds; the oldest comes first."""
        self._by_priority: Counter[int] = Counter()

    @property
    def are_several(self) -> bool:
        return len(self._arrived_at_s) > 1

    def has_rivals(self, claim: ActiveTenant) -> bool:
        """Returns whether other tenants of the same or a higher class are active."""
        others = sum(count for priority, count in self._by_priority.items() if priority >= claim.priority)
        return others > (claim in self._arrived_at_s)

    def arrived(self, request: QueuedRequest, now_s: float) -> None:
        claim = ActiveTenant.of(request)
        if self._arrived_at_s.pop(claim, None) is None:
            self._by_priority[claim.priority] += 1
        self._arrived_at_s[claim] = now_s
        while next(iter(self._arrived_at_s.values())) + REMEMBERED_S < now_s:
            longest_ago = next(iter(self._arrived_at_s))
            del self._arrived_at_s[longest_ago]
            self._by_priority[longest_ago.priority] -= 1


@dataclass(frozen=True, slots=True)
class Free:
    """Free capacity of the workers. Each request that a wake releases reduces it."""

    computing: set[WorkerId]
    """Workers that would begin to compute a prompt at once, or almost at once."""
    room: dict[WorkerId, float]
    """For each decode worker, how many requests it has room for besides one more. Below 0, there is no room."""


class Capacity:
    """Predicts free capacity from reports and from the requests that this router has sent since."""

    def __init__(self, selector: Selector, reservations: Reservations, lone_ahead_s: float) -> None:
        self._selector = selector
        self._reservations = reservations
        self._lone_ahead_s = lone_ahead_s
        self._sent: dict[RequestId, Placement] = {}
        """Placements without a first token."""
        self._sent_to: dict[WorkerId, dict[RequestId, None]] = {}
        self._open_s = USUAL_OPEN_S
        self._slots: dict[RequestId, tuple[WorkerId, ActiveTenant]] = {}
        """The decode worker at which each request holds a slot, or will hold one, and its tenant."""
        self._taken: Counter[tuple[WorkerId, ActiveTenant]] = Counter()
        self.tenants = ActiveTenants()

    def sent(self, placement: Placement) -> None:
        request_id, decode = placement.request_id, placement.decision.decode
        self.ended(request_id)
        slot = self._slots[request_id] = decode, ActiveTenant.of(placement.request)
        self._taken[slot] += 1
        self._sent[request_id] = placement
        for worker in {placement.computed_by, decode}:
            self._sent_to.setdefault(worker, {})[request_id] = None

    def done(self, request_id: RequestId) -> Placement | None:
        """Notes that a prompt is computed or its request over. Returns the placement. None: that was noted before."""
        placement = self._sent.pop(request_id, None)
        for worker in () if placement is None else {placement.computed_by, placement.decision.decode}:
            ahead = self._sent_to[worker]
            del ahead[request_id]
            if not ahead:
                del self._sent_to[worker]
        return placement

    def ended(self, request_id: RequestId) -> None:
        """Notes that the request is over, and frees its slot."""
        self.done(request_id)
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._taken[slot] -= 1
            if not self._taken[slot]:
                del self._taken[slot]

    def limited(self, request: QueuedRequest, workers: Workers, slo_s: float | None, now_s: float) -> QueuedRequest:
        """Returns the request with `limit_s` set: the time by which its first token must have come.

        Its deadline becomes the client's less the expected seconds of the output after the first token: an output
        that cannot finish in time would hold a slot for nothing.
        """
        slo_at_s = None if slo_s is None else request.arrived_s + slo_s
        if request.deadline_s is None or not workers.decode:
            limits = [at_s for at_s in (request.deadline_s, slo_at_s) if at_s is not None]
            return dataclasses.replace(request, limit_s=min(limits, default=None))
        tokens = min(request.attempt.most_new_tokens, self._selector.output_tokens)
        tokens_s = (
            worker.cost.of_streams(worker.load.running + 1, 0) / worker.step_tokens_each for worker in workers.decode
        )
        token_s = self._selector.token_s or min(tokens_s)
        output_s = OUTPUT_MARGIN * max(0.0, tokens - 1) * token_s
        deadline_s = request.deadline_s - min(output_s, MOST_OUTPUT_SHARE * max(0.0, request.deadline_s - now_s))
        limit_s = deadline_s if slo_at_s is None else min(deadline_s, slo_at_s)
        return dataclasses.replace(request, deadline_s=deadline_s, limit_s=limit_s)

    def cost_s(self, request: QueuedRequest, decision: Decision, workers: Workers) -> float:
        """Returns the seconds that the request costs its tenant: its prefill, and what its output adds to decode steps.

        The output counts with the tokens of recent outputs, or fewer if it may not have so many.
        """
        decode = workers.by_id.get(decision.decode)
        if decode is None:
            return decision.forecast.prefill_s
        streams = max(1, decode.load.running)
        step_s = decode.cost.of_streams(streams + 1, 0) - decode.cost.of_streams(streams, 0)
        tokens = min(request.attempt.most_new_tokens, self._selector.output_tokens)
        return decision.forecast.prefill_s + tokens / decode.step_tokens_each * max(0.0, step_s)

    def sent_to(self, worker: WorkerId) -> Iterable[RequestId]:
        return self._sent_to.get(worker, ())

    def opened_in(self, seconds: float) -> None:
        """Notes the seconds that an Open took."""
        self._open_s += OPEN_MEMORY * (seconds - self._open_s)

    def ahead_s(self, worker: Worker) -> float:
        """Returns the seconds of work to keep queued at a worker: some steps, two Opens, and the lag of reports."""
        costs = worker.load.costs
        step_s = worker.cost.of_prompt(costs.step_tokens, 0, costs.step_tokens)
        if worker.role is Role.DECODE and costs.step_target_s:
            step_s = min(step_s, costs.step_target_s)
        ahead_s = STEPS_AHEAD * step_s + 2 * self._open_s + REPORT_LAG_S
        return ahead_s if self.tenants.are_several else max(ahead_s, self._lone_ahead_s)

    def queue_s(self, worker: Worker, now_s: float) -> float:
        """Returns the seconds of uncomputed work at a worker: what it reported, and what this router sent since.

        Reservations of other routers do not count, or each would wait for the others.
        """
        unseen_s = sum(self._unseen_s(request_id, worker.worker_id) for request_id in self.sent_to(worker.worker_id))
        return worker.queue_s(now_s) + unseen_s

    def free(self, workers: Workers, now_s: float) -> Free:
        return Free(
            {worker.worker_id for worker in workers.by_id.values() if self.has_time(worker, now_s)},
            {decode.worker_id: self.room(decode) for decode in workers.decode},
        )

    def has_time(self, worker: Worker, now_s: float) -> bool:
        """Returns whether a worker would compute a prompt almost at once. True while its speed is unknown."""
        return not _is_known(worker) or self.queue_s(worker, now_s) <= self.ahead_s(worker)

    def has_slot(self, decode: Worker, request: QueuedRequest) -> bool:
        """Returns whether the request's tenant may take one more of the worker's slots.

        Without this bound, long outputs of one tenant would fill the worker, and other tenants would wait until one
        of them ends.
        """
        claim, slots = ActiveTenant.of(request), decode.load.slots
        if not slots or not self.tenants.has_rivals(claim):
            return True
        return self._taken[decode.worker_id, claim] < max(1.0, MOST_SLOTS * slots)

    def room(self, decode: Worker) -> float:
        """Returns for how many requests the worker has room besides one more. Below 0, there is no room.

        As many may wait at a worker as streams will end there while a request is sent. Requests that were sent since
        its last report count as waiting, beyond its free slots.
        """
        load = decode.load
        if not load.waiting and not load.slots:
            return math.inf
        waiting = load.waiting + sum(
            self._unseen_s(request_id, decode.worker_id) > 0 for request_id in self.sent_to(decode.worker_id)
        )
        if not load.waiting:
            waiting -= max(0, load.slots - load.running)
        step_s = max(decode.cost.of_streams(load.running, 0), load.seconds_per_step)
        output_s = self._selector.output_tokens / decode.step_tokens_each * step_s
        ending = load.running * self.ahead_s(decode) / output_s if output_s > 0 else 0.0
        most = MOST_ENDING * load.slots if self.tenants.are_several else MOST_LONE_ENDING * load.max_waiting
        if most:
            ending = min(ending, most)
        return 1 + ending - waiting

    def next_free_s(self, workers: Workers, now_s: float) -> float | None:
        """Predicts when the first busy worker has time again; None if none is busy."""
        busy = [worker for worker in workers.by_id.values() if not self.has_time(worker, now_s)]
        return min((now_s + self.queue_s(worker, now_s) - self.ahead_s(worker) for worker in busy), default=None)

    def is_trusted(self, worker: Worker, now_s: float) -> bool:
        """Returns whether the worker's costs are good enough to refuse a request by them.

        The first costs are measured while the cluster starts, so they are trusted only after a client's prompt.
        Costs of an idle worker may be of a bad moment: after a while, one request goes there to measure again.
        """
        if not _is_known(worker) or not worker.load.prefill_busy_s:
            return False
        if worker.queue_s(now_s) > 0 or any(True for _ in self.sent_to(worker.worker_id)):
            return True
        return worker.prefilled_at_s is not None and worker.prefilled_at_s + TRUSTED_S > now_s

    def _unseen_s(self, request_id: RequestId, worker: WorkerId) -> float:
        return self._reservations.own_share(request_id, worker).seconds


def _is_known(worker: Worker) -> bool:
    """Returns whether the worker has measured and reported its prompt speed."""
    return worker.cost.prompt_token_s > 0
