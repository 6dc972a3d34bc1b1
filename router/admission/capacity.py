"""Whether a worker has time for one more request now, or will only let it wait. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from router.admission.active_tenants import Claimants, Slots, claimant_of
from router.admission.queued_request import Wanting, Workers
from router.fleet.worker import Member
from router.routing.policy import Decision
from router.routing.reservations import REPORT_LAG_S, Reservations
from router.routing.selector import Selector
from twostroke.config import Role
from twostroke.ids import RequestId, WorkerId

STEPS_AHEAD = 2.0
"""Work that a worker needs ahead so as not to run dry: the step that runs (a report may be that old), and a full one
to follow it, planned from what is there when it begins."""
TRUSTED_S = 10.0
"""What an idle worker says of its costs refuses nobody after this."""
OPEN_MEMORY = 0.05
"""Weight of the latest Open in the expected duration of the next one."""
ANSWERING_MARGIN = 1.25
"""Over the expected time of an answer: under load everybody who is let in is let in at the last moment, and what is no
slower than usual only on average would be late half of the time."""
MOST_ANSWERING = 0.5
"""Of the time that a client gives a request, what its answer may be expected to take at most: however long those of
others were, this one may be short, and whoever leaves that much time before the first token is worth a try."""
MOST_SLOTS = 0.75
"""Of a decode worker's slots, for answers of one claimant where others ask as well."""
MOST_ENDING = 0.25
"""Of a worker's seats, how many may be expected to be given back while a request is on its way: those who sit there may
want longer answers than those who have left."""
USUAL_OPEN_S = 0.005
"""Before the first."""


@dataclass(frozen=True, slots=True)
class Free:
    """What workers have free, as a wake goes on."""

    computing: set[WorkerId]
    """Those that would compute a prompt (almost) at once."""
    room: dict[WorkerId, float]
    """By decode worker, answers for which it has room, at 0 still one."""


class Headroom:
    """Knows what this router has sent to whom and has no first token yet."""

    def __init__(self, selector: Selector, reservations: Reservations, lone_ahead_s: float) -> None:
        self._selector = selector
        self._reservations = reservations
        self._lone_ahead_s = lone_ahead_s
        self._sent: dict[RequestId, tuple[WorkerId, ...]] = {}
        self._sent_to: dict[WorkerId, dict[RequestId, None]] = {}
        self._open_s = USUAL_OPEN_S
        self._slots = Slots()
        self.claimants = Claimants()

    def sent(self, wanting: Wanting, decision: Decision) -> None:
        request_id, workers = wanting.ask.request_id, {decision.source or decision.decode, decision.decode}
        self.done(request_id)
        self._slots.take(request_id, decision.decode, claimant_of(wanting))
        self._sent[request_id] = tuple(workers)
        for worker in workers:
            self._sent_to.setdefault(worker, {})[request_id] = None

    def done(self, request_id: RequestId) -> bool:
        """It computes no prompt any more; False where that is no news."""
        workers = self._sent.pop(request_id, ())
        for worker in workers:
            ahead = self._sent_to[worker]
            del ahead[request_id]
            if not ahead:
                del self._sent_to[worker]
        return bool(workers)

    def ended(self, request_id: RequestId) -> None:
        """The whole answer is over."""
        self.done(request_id)
        self._slots.give_back(request_id)

    def to_answer_in_time(self, wanting: Wanting, workers: Workers, now_s: float) -> Wanting:
        """Its deadline is the whole answer's: the first token has to come sooner, by what those after it are expected
        to take. An answer that cannot be whole in time would cost others their seats for nothing."""
        if wanting.deadline_s is None or not workers.decode:
            return wanting
        tokens = min(wanting.ask.most_answer_tokens, self._selector.answer_tokens)
        steps_s = (member.cost.of_streams(member.load.running + 1, 0) for member in workers.decode)
        token_s = self._selector.token_s or min(steps_s)
        answering_s = min(
            ANSWERING_MARGIN * max(0.0, tokens - 1) * token_s, MOST_ANSWERING * max(0.0, wanting.deadline_s - now_s)
        )
        return dataclasses.replace(wanting, deadline_s=wanting.deadline_s - answering_s)

    def cost_s(self, wanting: Wanting, decision: Decision, workers: Workers) -> float:
        """What the answer costs its tenant: its prompt, and what its tokens add to the steps of its decode worker. As
        many as it may have, or as answers have lately."""
        decode = workers.everyone.get(decision.decode)
        if decode is None:
            return decision.forecast.prefill_s
        streams = max(1, decode.load.running)
        token_s = decode.cost.of_streams(streams + 1, 0) - decode.cost.of_streams(streams, 0)
        tokens = min(wanting.ask.most_answer_tokens, self._selector.answer_tokens)
        return decision.forecast.prefill_s + tokens * max(0.0, token_s)

    def sent_to(self, worker: WorkerId) -> Iterable[RequestId]:
        return self._sent_to.get(worker, ())

    def opened_in(self, seconds: float) -> None:
        """An Open took this long."""
        self._open_s += OPEN_MEMORY * (seconds - self._open_s)

    def ahead_s(self, member: Member) -> float:
        """Work that the worker should have ahead: a few steps, the way of a request from here to its queue (Open, and
        the pull that it leads to), and what counts as work there until a report shows it done."""
        costs = member.load.costs
        step_s = member.cost.of_prompt(costs.step_tokens, 0, costs.step_tokens)
        if member.role is Role.DECODE and costs.step_target_s:
            step_s = min(step_s, costs.step_target_s)
        ahead_s = STEPS_AHEAD * step_s + 2 * self._open_s + REPORT_LAG_S
        return ahead_s if self.claimants.are_several else max(ahead_s, self._lone_ahead_s)

    def queue_s(self, member: Member, now_s: float) -> float:
        """What is dispatched there and not computed: as reported, and what this router has sent since. What other
        routers hold does not count (each would wait for the others), nor what they sent in the last moment."""
        unseen_s = sum(self._unseen_s(request_id, member.worker) for request_id in self.sent_to(member.worker))
        return member.queue_s(now_s) + unseen_s

    def free(self, workers: Workers, now_s: float) -> Free:
        return Free(
            {member.worker for member in workers.everyone.values() if self.has_time(member, now_s)},
            {decode.worker: self.room(decode) for decode in workers.decode},
        )

    def has_time(self, member: Member, now_s: float) -> bool:
        """Always, where it has not shown yet how fast it is."""
        return not is_known(member) or self.queue_s(member, now_s) <= self.ahead_s(member)

    def has_slot(self, decode: Member, wanting: Wanting) -> bool:
        """Its claimant holds no more than its share there. Otherwise the long answers of one would fill the worker, and
        another's would wait until the first of them ends."""
        claimant, slots = claimant_of(wanting), decode.load.seats
        if not slots or not self.claimants.has_rivals(claimant):
            return True
        return self._slots.taken(decode.worker, claimant) < max(1.0, MOST_SLOTS * slots)

    def room(self, decode: Member) -> float:
        """Answers for which it has pages and a slot, at 0 still one; below 0: none. No more may wait there than streams
        will end while a request is on its way. A burst of choices takes the slots before any report says so."""
        load = decode.load
        if not load.waiting and not load.seats:
            return math.inf
        waiting = load.waiting + sum(
            self._unseen_s(request_id, decode.worker) > 0 for request_id in self.sent_to(decode.worker)
        )
        if not load.waiting:
            waiting -= max(0, load.seats - load.running)
        step_s = decode.cost.of_streams(load.running, 0)
        answer_s = self._selector.answer_tokens * step_s
        ending = load.running * self.ahead_s(decode) / answer_s if answer_s > 0 else 0.0
        return 1 + min(ending, MOST_ENDING * load.seats) - waiting

    def next_free_s(self, workers: Workers, now_s: float) -> float | None:
        """When, as predicted, one of those that have no time now will have some."""
        busy = [member for member in workers.everyone.values() if not self.has_time(member, now_s)]
        return min((now_s + self.queue_s(member, now_s) - self.ahead_s(member) for member in busy), default=None)

    def _unseen_s(self, request_id: RequestId, worker: WorkerId) -> float:
        return self._reservations.own_share(request_id, worker).seconds

    def is_trusted(self, member: Member, now_s: float) -> bool:
        """Its costs are good enough to refuse somebody. Those of its first moments, measured while a whole cluster
        started beside it, refuse nobody until it has computed a prompt that somebody sent. Those of an idle worker that
        has computed nothing for a while may come of a bad moment, too, and if all were refused for it, it would never
        learn better: one is let in to see."""
        if not is_known(member) or not member.load.prefill_busy_s:
            return False
        if member.queue_s(now_s) > 0 or any(True for _ in self.sent_to(member.worker)):
            return True
        return member.prefilled_at_s is not None and member.prefilled_at_s + TRUSTED_S > now_s


def is_known(member: Member | None) -> bool:
    """It has computed prompts, and said how fast."""
    return member is not None and member.cost.prompt_token_s > 0
