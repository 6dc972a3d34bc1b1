"""A fleet in virtual time around a real admission: prefill workers compute what they are given, one after the other."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from router.admission.admission import Admission
from router.admission.queued_request import Placement, QueuedRequest, Refused, Rules, Stranded, Verdict
from router.fleet.worker import Shape, Worker
from router.routing.policies.priced import Priced, Prices
from router.routing.policy import Policy
from router.routing.prefix_index import PrefixIndex
from router.routing.reservations import Reservations
from router.routing.selector import Selector, Workers
from tests.unit.router.queued import queued_request
from twostroke.base.ids import BlockHash, Epoch, RequestId, WorkerId
from twostroke.config import Role
from twostroke.rpc.v1 import control_pb2

BLOCK = 16
TOKEN_S = 0.001
STEP_TOKENS = 32
SHAPE = Shape(block_size=BLOCK, page_bytes=1024)
TAIL_S = 0.002
REMOTE = Prices(computes_locally=False)


def fleet_worker(worker: str, role: Role, *, token_s: float = TOKEN_S) -> Worker:
    return reporting(
        Worker(WorkerId(worker), role, "nowhere:1", Epoch(1, 1), control_pb2.WORKER_STATE_SERVING), token_s=token_s
    )


def reporting(
    worker: Worker,
    now_s: float = 0.0,
    *,
    queued_s: float = 0.0,
    token_s: float = TOKEN_S,
    waiting: int = 0,
    prefill_busy_s: float = 1.0,
) -> Worker:
    costs = control_pb2.StepCosts(
        step_s=0.001, prompt_token_s=token_s, step_tokens=STEP_TOKENS, step_target_s=0.02 if token_s else 0.0
    )
    load = control_pb2.Load(
        pages_free=10**6,
        pages_total=10**6,
        queued_s=queued_s,
        costs=costs,
        waiting=waiting,
        running=min(1, waiting),
        prefill_busy_s=prefill_busy_s,
    )
    worker.report(load, now_s)
    return worker


@dataclass
class _Worker:
    fleet_worker: Worker
    queue: deque[tuple[RequestId, float]] = field(default_factory=deque)
    busy_until_s: float = 0.0
    busy_s: float = 0.0
    hangs: bool = False

    def queued_s(self, now_s: float) -> float:
        return max(0.0, self.busy_until_s - now_s) + sum(seconds for _, seconds in list(self.queue)[1:])


class VirtualFleet:
    """`ask` at virtual times, `run`, and see what came when."""

    def __init__(self, rules: Rules | None = None, *, prefill: int = 1, policy: Policy | None = None) -> None:
        self.reservations = Reservations()
        selector = Selector(policy or Priced(REMOTE), PrefixIndex(), self.reservations, seed=1)
        self.admission = Admission(rules or Rules(lone_ahead_s=0.0), selector, self.reservations)
        self.workers = {f"p{number}": _Worker(fleet_worker(f"p{number}", Role.PREFILL)) for number in range(prefill)}
        self.decode = [fleet_worker("d0", Role.DECODE)]
        self.now_s = 0.0
        self.true_share = 1.0
        """The share of the predicted seconds that a prompt really takes."""
        self.tokens: dict[str, int] = {}
        self.asked_s: dict[str, float] = {}
        self.first_token_s: dict[str, float] = {}
        self.released: list[str] = []
        self.went_to: dict[str, str] = {}
        self.refused: dict[str, tuple[float, Refused]] = {}
        self.stranded: list[str] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = itertools.count()

    def ask(self, name: str, *, at_s: float = 0.0, tokens: int = 160, **queued) -> None:
        self._at(at_s, lambda: self._enter(name, tokens, queued))

    def run(self, until_s: float = 1e6) -> VirtualFleet:
        while True:
            wake_at_s = self.admission.wake_at_s
            if wake_at_s is not None and (not self._events or wake_at_s < self._events[0][0]):
                self.now_s = max(self.now_s, wake_at_s)
                if self.now_s > until_s:
                    return self
                self._wake()
                continue
            if not self._events or self._events[0][0] > until_s:
                return self
            at_s, _, event = heapq.heappop(self._events)
            self.now_s = max(self.now_s, at_s)
            event()

    @property
    def serving(self) -> Workers:
        return Workers(SHAPE, self.decode, [worker.fleet_worker for worker in self.workers.values()])

    def ttft_s(self, name: str) -> float:
        return self.first_token_s[name] - self.asked_s[name]

    def queued(self, name: str, tokens: int = 160, most_output_tokens: int = 8, **queued) -> QueuedRequest:
        hashes = tuple(BlockHash(next(self._names).to_bytes(16, "big")) for _ in range(tokens // BLOCK))
        return queued_request(name, tokens, hashes, most_output_tokens, **{"arrived_s": self.now_s, **queued})

    def leave(self, name: str) -> None:
        self.admission.leave(RequestId(name), self.now_s)
        self._wake()

    def hang(self, worker: str) -> None:
        """It ends nothing from now on, and says so."""
        self.workers[worker].hangs = True
        reporting(self.workers[worker].fleet_worker, self.now_s, queued_s=1000.0)

    def _enter(self, name: str, tokens: int, queued: dict[str, object]) -> None:
        self.tokens[name], self.asked_s[name] = tokens, self.now_s
        verdict = self.admission.enter(self.queued(name, tokens, **queued), self.serving, self.now_s)
        if verdict is None:
            self._wake()
        else:
            self._take(verdict)

    def _wake(self) -> None:
        for verdict in self.admission.wake(self.serving, self.now_s):
            self._take(verdict)

    def _take(self, verdict: Verdict) -> None:
        name = str(verdict.request_id)
        if isinstance(verdict, Refused):
            self.refused[name] = (self.now_s, verdict)
        elif isinstance(verdict, Stranded):
            self.stranded.append(name)
        else:
            self._dispatch(name, verdict)

    def _dispatch(self, name: str, released: Placement) -> None:
        self.released.append(name)
        self.reservations.opened(released.request_id, self.now_s)
        self.went_to[name] = released.decision.source or released.decision.decode
        worker = self.workers[self.went_to[name]]
        worker.queue.append((released.request_id, self.tokens[name] * TOKEN_S * self.true_share))
        if len(worker.queue) == 1:
            self._begin(worker)

    def _begin(self, worker: _Worker) -> None:
        seconds = worker.queue[0][1]
        worker.busy_until_s = self.now_s + seconds
        worker.busy_s += seconds
        self._at(worker.busy_until_s, lambda: self._end(worker))

    def _end(self, worker: _Worker) -> None:
        if worker.hangs:
            return
        request_id, _ = worker.queue.popleft()
        self._at(self.now_s + TAIL_S, lambda: self._first_token(request_id))
        if worker.queue:
            self._begin(worker)
        self._report(worker)

    def _first_token(self, request_id: RequestId) -> None:
        self.first_token_s[str(request_id)] = self.now_s
        self.admission.first_token(request_id, self.now_s)
        self._wake()

    def _report(self, worker: _Worker) -> None:
        self.reservations.reported(worker.fleet_worker.worker_id, self.now_s)
        reporting(worker.fleet_worker, self.now_s, queued_s=worker.queued_s(self.now_s))
        self._wake()

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))
