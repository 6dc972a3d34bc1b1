"""What a router says of its workers, and how busy this machine is."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from cluster.clients.admin_access import AdminAccess
from twostroke.config import Role
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.v1 import control_pb2
from twostroke.rpc.v1.control_pb2_grpc import ControlStub

ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Reading:
    at_s: float
    prefill_busy_s: dict[str, float]
    """Seconds that each prefill worker has spent on prompts since it began."""
    machine_busy_s: float
    """Busy seconds of all cores since the machine began."""
    machine_s: float
    """Seconds of all cores since the machine began."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Shares of the time between two readings."""

    workers: dict[str, float]
    """Share of time that each prefill worker spent on prompts."""
    machine: float
    """Share of time that all cores were busy."""

    @property
    def utilisation(self) -> float:
        return sum(self.workers.values()) / len(self.workers) if self.workers else 0.0


async def read(admin: AdminAccess) -> Reading:
    peer = PeerChannel(admin.addresses[0], admin.token)
    try:
        answer = await peer.call(ControlStub(peer.channel).GetLoad, control_pb2.GetLoadRequest(), ANSWER_S)
    finally:
        await peer.close()
    busy_s, machine_s = _machine_times()
    return Reading(
        at_s=time.perf_counter(),
        prefill_busy_s={
            each.worker_id: each.load.prefill_busy_s for each in answer.workers if each.server.role == Role.PREFILL
        },
        machine_busy_s=busy_s,
        machine_s=machine_s,
    )


def between(first: Reading, last: Reading) -> Busy:
    seconds, machine_s = last.at_s - first.at_s, last.machine_s - first.machine_s
    return Busy(
        workers={
            worker: (busy_s - first.prefill_busy_s.get(worker, 0.0)) / seconds
            for worker, busy_s in last.prefill_busy_s.items()
        },
        machine=(last.machine_busy_s - first.machine_busy_s) / machine_s if machine_s else 0.0,
    )


def _machine_times() -> tuple[float, float]:
    """Returns the busy seconds and all seconds of all cores. A guest's seconds are the user's, too."""
    times = psutil.cpu_times()
    machine_s = float(sum(times) - times.guest - times.guest_nice)
    return machine_s - times.idle - times.iowait, machine_s
