"""Simulated workers that come and go: as many of each role as a plan wants, which is asked at regular intervals.

A worker that comes serves after its start-up time. One that goes gets nothing new, and ends when it has answered what
it has. Its cache is lost, where a live one would hand it over. A worker that becomes the other role is such a pair,
with a short start-up time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tools.simulate.fleet.event_queue import EventQueue
from tools.simulate.fleet.results import RequestOutcome
from tools.simulate.fleet.worker.host import SimulatedHost
from tools.simulate.fleet.worker.worker_lifecycle import WorkerLifecycle
from twostroke.base.ids import WorkerId
from twostroke.config import Role
from twostroke.rpc.v1.control_pb2 import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """The fleet as a supervisor would be told of it."""

    at_s: float
    arrived: int
    ended: Sequence[RequestOutcome]
    """Since the report before."""
    loads: dict[str, tuple[Role, Load]]
    serving: dict[Role, int]
    desired: dict[Role, int]
    """With those that still start, without those that go."""


class Scaler(Protocol):
    @property
    def begin(self) -> dict[Role, int]:
        """Returns how many workers there are at first; `FleetShape` says how many there may be."""

    @property
    def tick_s(self) -> float: ...

    @property
    def start_s(self) -> float:
        """Seconds until a new worker serves."""

    @property
    def switch_s(self) -> float:
        """Seconds until a worker of the other role serves in its new role."""

    def __call__(self, report: FleetReport) -> dict[Role, int]:
        """Returns how many workers of each role there are to be from now on."""


class ScaledWorkers:
    def __init__(
        self,
        queue: EventQueue,
        workers: WorkerLifecycle,
        scaler: Scaler,
        join: Callable[[SimulatedHost], None],
        leave: Callable[[SimulatedHost], None],
    ) -> None:
        self._queue = queue
        self._workers = workers
        self._scaler = scaler
        self._join = join
        self._leave = leave
        self._begun_s: dict[WorkerId, float] = dict.fromkeys((host.worker for host in workers.alive), queue.now_s)
        """When each that there is was asked for."""
        self._starting: set[WorkerId] = set()
        self._switching: dict[Role, int] = {Role.PREFILL: 0, Role.DECODE: 0}
        """Workers that will have been of the other role."""
        self._worker_s = 0.0
        """Worker seconds of workers that are gone."""
        self._ended: list[RequestOutcome] = []
        self.arrived = 0
        self.changes = 0
        queue.after(scaler.tick_s, self._tick)

    def worker_seconds(self, until_s: float) -> float:
        return self._worker_s + sum(max(0.0, until_s - begun_s) for begun_s in self._begun_s.values())

    def over(self, outcome: RequestOutcome) -> None:
        self._ended.append(outcome)

    def _tick(self) -> None:
        for worker in list(self._workers.leaving):
            self._end_if_idle(worker)
        desired = {role: len(self._staying(role)) + self._switching[role] for role in self._switching}
        ended, self._ended = self._ended, []
        listed = self._workers.listed
        wanted = self._scaler(
            FleetReport(
                at_s=self._queue.now_s,
                arrived=self.arrived,
                ended=ended,
                loads={str(host.worker): (host.role, host.feed.load_report()) for host in listed},
                serving={role: sum(host.role is role for host in listed) for role in desired},
                desired=desired,
            )
        )
        self._become(wanted, desired)
        self._queue.after(self._scaler.tick_s, self._tick)

    def _become(self, wanted: dict[Role, int], desired: dict[Role, int]) -> None:
        lacks = {role: wanted[role] - desired[role] for role in desired}
        self.changes += any(lacks.values())
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            switching = max(0, min(lacks[role], -lacks[other]))
            for _ in range(switching):
                self._go(other, then=role)
            lacks[role], lacks[other] = lacks[role] - switching, lacks[other] + switching
        for role, lack in lacks.items():
            for _ in range(lack):
                self._come(role, self._scaler.start_s)
            for _ in range(-lack):
                self._go(role, then=None)

    def _staying(self, role: Role) -> list[WorkerId]:
        return [w for w in self._begun_s if w not in self._workers.leaving and w.startswith(role.value)]

    def _come(self, role: Role, start_s: float) -> None:
        free = (w for w in self._workers.known if w.startswith(role.value) and w not in self._begun_s)
        worker = next(free, None)
        if worker is None:
            self._keep(role)
            return
        self._begun_s[worker] = self._queue.now_s
        self._starting.add(worker)
        self._queue.after(start_s, lambda: self._serve(worker))

    def _keep(self, role: Role) -> None:
        """Keeps one of the workers that leave: there are no more workers than have names."""
        worker = next(w for w in self._workers.leaving if w.startswith(role.value))
        then = self._workers.leaving.pop(worker)
        if then is not None:
            self._switching[then] -= 1
        self._join(self._workers.host(worker))

    def _serve(self, worker: WorkerId) -> None:
        if worker in self._starting:
            self._starting.discard(worker)
            self._join(self._workers.begin(worker))

    def _go(self, role: Role, then: Role | None) -> None:
        """Removes a worker that still starts, or else the one with the least to do."""
        desired = self._staying(role)
        if not desired:
            return  # they still are of the other role; the next report comes
        starting = [worker for worker in desired if worker in self._starting]
        if then is not None:
            self._switching[then] += 1
        if starting:
            self._starting.discard(starting[-1])
            self._gone(starting[-1], then)
            return
        worker = min(desired, key=lambda worker: self._workers.host(worker).scheduler.running)
        self._workers.leaving[worker] = then
        self._leave(self._workers.host(worker))
        self._end_if_idle(worker)

    def _end_if_idle(self, worker: WorkerId) -> None:
        host = self._workers.host(worker)
        if not host.is_idle:
            return
        then = self._workers.leaving.pop(worker)
        self._workers.end(worker)
        self._gone(worker, then)

    def _gone(self, worker: WorkerId, then: Role | None) -> None:
        self._worker_s += self._queue.now_s - self._begun_s.pop(worker)
        if then is not None:
            self._switching[then] -= 1
            self._come(then, self._scaler.switch_s)
