"""The workers of a simulated fleet: which are alive, in which epoch, and how each dies and comes back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tools.simulate.fleet.results import WorkerUse
from tools.simulate.fleet.simulated_request import SimulatedRequest
from tools.simulate.fleet.worker.decode_service import SimulatedDecodeService
from tools.simulate.fleet.worker.host import SharedFleet, SimulatedHost
from twostroke.base.ids import Epoch, WorkerId
from twostroke.config import Role


class WorkerLifecycle:
    def __init__(self, fleet: SharedFleet, begin: dict[Role, int] | None = None) -> None:
        """`begin`: this many of each role at first (None: all of them)."""
        self._fleet = fleet
        self._shape = shape = fleet.shape
        self.uses = {worker: WorkerUse(worker=worker, role=Role(worker.rpartition("-")[0])) for worker in shape.workers}
        self._hosts = fleet.hosts
        self.leaving: dict[WorkerId, Role | None] = {}
        """Workers that finish what they have, each with the role in which its next epoch begins at once."""
        for worker in shape.workers:
            if begin is None or int(worker.rpartition("-")[2]) < begin[self.uses[worker].role]:
                self.begin(worker)

    @property
    def known(self) -> tuple[WorkerId, ...]:
        """All that there may ever be."""
        return self._shape.workers

    @property
    def listed(self) -> list[SimulatedHost]:
        """Alive, and may be given work."""
        return [host for host in self.alive if host.worker not in self.leaving]

    @property
    def alive(self) -> list[SimulatedHost]:
        return [host for host in self._hosts.values() if not host.is_dead]

    @property
    def latest(self) -> list[SimulatedHost]:
        """The latest epoch of each worker that has begun."""
        return [self._hosts[worker] for worker in self._shape.workers if worker in self._hosts]

    def host(self, worker: WorkerId) -> SimulatedHost:
        """The worker's latest epoch."""
        return self._hosts[worker]

    @property
    def decode_services(self) -> list[SimulatedDecodeService]:
        """Returns the calls to the decode workers that are alive."""
        return [host.decode_service for host in self.alive if host.decode_service is not None]

    def decode_service(self, worker: WorkerId) -> SimulatedDecodeService:
        """Returns the service of a decode worker's latest epoch."""
        service = self._hosts[worker].decode_service
        assert service is not None, f"{worker} is not a decode worker"
        return service

    def begin(self, worker: WorkerId) -> SimulatedHost:
        """Begins a new epoch with an empty cache."""
        use = self.uses[worker]
        epoch = Epoch(use.epochs + 1, _nonce(f"{self._shape.seed} {worker} {use.epochs + 1}"))
        host = self._hosts[worker] = SimulatedHost(self._fleet, worker, epoch, use)
        return host

    def end(self, worker: WorkerId) -> Sequence[SimulatedRequest]:
        """Kills a worker; returns the requests that it owned."""
        return self._hosts[worker].die()

    def check_quiet(self) -> None:
        for host in self.alive:
            host.check_quiet()

    def reach_span_end(self) -> None:
        """Notes that the last request has arrived."""
        for use in self.uses.values():
            use.prefill_span_s = use.prefill_s


def _nonce(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
