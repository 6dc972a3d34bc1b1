"""Whatever happens to requests and workers, in whatever order: nothing of a request outlives it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.admission.admission import Admission
from router.admission.queued_request import Placement, Refused, Rules, Stranded, Verdict
from router.routing.policies import policy_named
from router.routing.reservations import Reservations
from router.routing.selector import Workers
from tests.unit.router.virtual import SHAPE, VirtualFleet, fleet_worker, reporting
from twostroke.base.ids import RequestId, WorkerId
from twostroke.config import Role


class History:
    """Random events, and who is open by what admission has said."""

    def __init__(self, seed: int, policy: str) -> None:
        self.draw = random.Random(seed)
        rules = Rules(
            reconsiders=policy == "kv",
            slo_ttft_s=self.draw.choice([None, 2.0]),
            most_queued=self.draw.choice([5, 30]),
            lone_ahead_s=0.0,
        )
        self.fleet = VirtualFleet(rules, policy=policy_named(policy))
        self.workers = {f"p{n}": fleet_worker(f"p{n}", Role.PREFILL) for n in range(3)}
        self.workers |= {f"d{n}": fleet_worker(f"d{n}", Role.DECODE) for n in range(2)}
        self.away: set[str] = set()
        self.held: set[str] = set()
        self.sent: set[str] = set()
        """Those without a first token."""
        self.answering: set[str] = set()
        self.now_s = 0.0
        self.asked = 0

    @property
    def admission(self) -> Admission:
        return self.fleet.admission

    def serving(self) -> Workers:
        here = [worker for name, worker in self.workers.items() if name not in self.away]
        decode = [worker for worker in here if worker.role is Role.DECODE]
        return Workers(SHAPE, decode, [worker for worker in here if worker.role is Role.PREFILL])

    def step(self) -> None:
        self.now_s += self.draw.expovariate(20)
        self.fleet.now_s = self.now_s
        events = (self.ask, self.ask, self.wake, self.wake, self.answer, self.leave, self.report, self.come_or_go)
        self.draw.choice(events)()

    def ask(self) -> None:
        if not self.serving().decode:
            return
        name = f"r{self.asked}"
        self.asked += 1
        queued = self.fleet.queued(
            name,
            self.draw.choice([32, 160, 1600]),
            tenant=self.draw.choice("abc"),
            priority=self.draw.randrange(2),
            deadline_s=self.draw.choice([None, self.now_s + 1.0]),
            is_urgent=self.draw.random() < 0.05,
        )
        verdict = self.admission.enter(queued, self.serving(), self.now_s)
        self.held.add(name)
        if verdict is not None:
            self.hear(verdict)

    def wake(self) -> None:
        for verdict in self.admission.wake(self.serving(), self.now_s):
            self.hear(verdict)

    def hear(self, verdict: Verdict) -> None:
        name = str(verdict.request_id)
        self.held.remove(name)
        if isinstance(verdict, Placement):
            self.sent.add(name)
            self.fleet.reservations.opened(verdict.request_id, self.now_s)
        else:
            assert isinstance(verdict, Refused | Stranded)

    def answer(self) -> None:
        for name in sorted(self.sent)[: self.draw.randrange(4)]:
            self.admission.first_token(RequestId(name), self.now_s)
            self.sent.remove(name)
            self.answering.add(name)

    def leave(self) -> None:
        for name in sorted(self.held | self.sent | self.answering)[:: self.draw.randrange(3, 9)]:
            displaced = {str(verdict.request_id) for verdict in self.admission._displaced}
            if name not in displaced:
                self.admission.leave(RequestId(name), self.now_s)
                self.held.discard(name)
                self.sent.discard(name)
                self.answering.discard(name)

    def report(self) -> None:
        name = self.draw.choice(sorted(self.workers.keys() - self.away) or ["p0"])
        self.fleet.reservations.reported(WorkerId(name), self.now_s)
        reporting(self.workers[name], self.now_s, queued_s=self.draw.choice([0.0, 0.1, 1.0, 5.0]))

    def come_or_go(self) -> None:
        self.away ^= {self.draw.choice(sorted(self.workers))}

    def check(self) -> None:
        admission = self.admission
        displaced = {str(verdict.request_id) for verdict in admission._displaced}
        assert set(admission._queued) == set(admission._queue) == self.held - displaced
        assert set(admission.capacity._slots) == self.sent | self.answering
        assert set(admission.capacity._sent) == self.sent
        assert admission._computed_by == Counter(held.computed_by for held in admission._queued.values())
        reservations: Reservations = self.fleet.reservations
        assert len(reservations) == len(admission._queued) + len(self.sent)
        for priority, reserved in admission._reserved_s.items():
            for worker, seconds in reserved.items():
                pending = [
                    h.shares_s.get(worker, 0.0)
                    for h in admission._queued.values()
                    if h.request.routing.priority == priority
                ]
                assert seconds == pytest.approx(sum(pending), abs=1e-6)


@pytest.mark.parametrize("policy", ["kv", "round-robin"])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_of_a_request_outlives_it(seed: int, policy: str) -> None:
    history = History(seed, policy)
    most_held = 0
    for _ in range(2000):
        history.step()
        history.check()
        most_held = max(most_held, len(history.held))
    assert history.asked > 200
    assert most_held > 2
    history.wake()
    for name in sorted(history.held | history.sent | history.answering):
        history.admission.leave(RequestId(name), history.now_s)
    admission, reservations = history.admission, history.fleet.reservations
    kept = (
        admission._queued,
        admission._computed_by,
        admission._reserved_s,
        admission._queue._entries,
        admission._queue._classes,
        admission.capacity._sent,
        admission.capacity._sent_to,
        admission.capacity._slots,
        admission.capacity._taken,
        reservations._placed,
        reservations._reserved,
        reservations._coming,
    )
    assert not any(kept), kept
    assert admission.wake(history.serving(), history.now_s + 1e6) == []
    assert admission.wake_at_s is None
