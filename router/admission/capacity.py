"""Tells whether a worker would begin one more request now, or only queue it. Pure."""

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
"""Steps of work that a worker must have ahead so that it never idles: the running one, and a full one after it."""
TRUSTED_S = 10.0
"""Age of an idle worker's costs above which they refuse no request."""
OPEN_MEMORY = 0.05
"""Weight of the latest Open in the expected duration of the next one."""
OUTPUT_MARGIN = 1.25
"""Safety factor on the expected time of an output: without it half of those sent at the last moment would be late."""
MOST_OUTPUT_SHARE = 0.5
"""Largest share of the client's time that the expected output may take. This output may be shorter than others were."""
USUAL_OPEN_S = 0.005
"""Expected duration of an Open before the first one."""
MOST_SLOTS = 0.75
"""Share of a decode worker's slots for one tenant's requests where others are active as well."""
MOST_ENDING = 0.25
"""Most of a worker's slots, as a share, that may be expected back while a request is on its way, if several tenants are
active. The requests that hold slots may want longer outputs than those that have ended, and other tenants would wait
for them. A single tenant waits for no other tenant, and the predicted times include what waits at the worker."""
MOST_LONE_ENDING = 0.25
"""Share of a worker's own queue for such requests where one tenant is active. It is not the whole queue: a request that
the worker refuses has no place in any queue, and other routers send requests there, too."""


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
            longest_ago = next(iter(self._arrived_at_s))
            del self._arrived_at_s[longest_ago]
            self._by_priority[longest_ago.priority] -= 1


@dataclass(frozen=True, slots=True)
class Free:
    """Free capacity of the workers. One pass over the queue reduces it by each request that it admits."""

    computing: set[WorkerId]
    """Workers that would begin to compute a prompt at once, or almost at once."""
    room: dict[WorkerId, float]
    """How many more requests each decode worker has room for. At 0 there is room for one."""


class Capacity:
    """Knows which requests this router has sent to each worker and that have no first token yet."""

    def __init__(self, selector: Selector, reservations: Reservations, lone_ahead_s: float) -> None:
        self._selector = selector
        self._reservations = reservations
        self._lone_ahead_s = lone_ahead_s
        self._sent: dict[RequestId, Placement] = {}
        """Placements without a first token."""
        self._sent_to: dict[WorkerId, dict[RequestId, None]] = {}
        self._open_s = USUAL_OPEN_S
        self._slots: dict[RequestId, tuple[WorkerId, ActiveTenant]] = {}
        """The slot of a decode worker that each request holds, or is on its way to."""
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
        """Notes that the prompt is computed or given up. Returns its placement, or None if that was noted before."""
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
        """Returns the request with the time by which its first token must have come.

        Its deadline becomes the client's, less the time that the output after the first token is expected to take: an
        output that cannot finish in time would cost others their slots for nothing.
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
        """Returns what the request costs its tenant: its prompt, and what its tokens add to steps of its decode worker.

        It counts as many tokens as the output may have, or as outputs have had lately.
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
        """Notes how long an Open took."""
        self._open_s += OPEN_MEMORY * (seconds - self._open_s)

    def ahead_s(self, worker: Worker) -> float:
        """Returns seconds of work to keep queued there: some steps, a request's way there, and the lag of reports."""
        costs = worker.load.costs
        step_s = worker.cost.of_prompt(costs.step_tokens, 0, costs.step_tokens)
        if worker.role is Role.DECODE and costs.step_target_s:
            step_s = min(step_s, costs.step_target_s)
        ahead_s = STEPS_AHEAD * step_s + 2 * self._open_s + REPORT_LAG_S
        return ahead_s if self.tenants.are_several else max(ahead_s, self._lone_ahead_s)

    def queue_s(self, worker: Worker, now_s: float) -> float:
        """Returns the seconds of work sent there and not computed: what it reported, and what this router sent since.

        What other routers have queued does not count, or each would wait for the others.
        """
        unseen_s = sum(self._unseen_s(request_id, worker.worker_id) for request_id in self.sent_to(worker.worker_id))
        return worker.queue_s(now_s) + unseen_s

    def free(self, workers: Workers, now_s: float) -> Free:
        return Free(
            {worker.worker_id for worker in workers.by_id.values() if self.has_time(worker, now_s)},
            {decode.worker_id: self.room(decode) for decode in workers.decode},
        )

    def has_time(self, worker: Worker, now_s: float) -> bool:
        """Returns whether it would compute a prompt almost at once; always true while its speed is unknown."""
        return not _is_known(worker) or self.queue_s(worker, now_s) <= self.ahead_s(worker)

    def has_slot(self, decode: Worker, request: QueuedRequest) -> bool:
        """Returns whether the request's tenant holds no more than its share of the worker's slots.

        Otherwise long outputs of one tenant would fill the worker, and another's would wait until the first of them
        ends.
        """
        claim, slots = ActiveTenant.of(request), decode.load.slots
        if not slots or not self.tenants.has_rivals(claim):
            return True
        return self._taken[decode.worker_id, claim] < max(1.0, MOST_SLOTS * slots)

    def room(self, decode: Worker) -> float:
        """Returns for how many requests it has pages and a slot; at 0 there is room for one, below 0 for none.

        No more may wait there than streams will end while a request is on its way. A burst of choices takes the slots
        before the worker's next report.
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
        """Returns whether its costs are good enough to refuse a request.

        First costs are measured while the cluster starts: they are trusted once the worker has computed a client's
        prompt. A worker that was idle may hold costs of a bad moment, so one request goes there to measure again.
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
