"""What a router says of its workers, and how busy this machine is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from cluster.clients.admin_access import AdminAccess
from twostroke.config import Role
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Reading:
    at_s: float
    prefill_busy_s: dict[str, float]
    """Seconds that each prefill worker has spent on prompts since it began."""
    machine_busy_ticks: float
    """Busy ticks of all cores since the machine began."""
    machine_ticks: float


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
    async with grpc.aio.insecure_channel(admin.addresses[0]) as channel:
        answer = await control_pb2_grpc.ControlStub(channel).GetLoad(
            control_pb2.GetLoadRequest(), timeout=ANSWER_S, metadata=admin.metadata
        )
    busy, whole = _machine_times()
    return Reading(
        at_s=time.perf_counter(),
        prefill_busy_s={
            each.worker_id: each.load.prefill_busy_s for each in answer.workers if each.server.role == Role.PREFILL
        },
        machine_busy_ticks=busy,
        machine_ticks=whole,
    )


def between(first: Reading, last: Reading) -> Busy:
    seconds, ticks = last.at_s - first.at_s, last.machine_ticks - first.machine_ticks
    return Busy(
        workers={
            worker: (busy_s - first.prefill_busy_s.get(worker, 0.0)) / seconds
            for worker, busy_s in last.prefill_busy_s.items()
        },
        machine=(last.machine_busy_ticks - first.machine_busy_ticks) / ticks if ticks else 0.0,
    )


def _machine_times() -> tuple[float, float]:
    """Busy and all, in ticks: the first line is "cpu user nice system idle iowait irq softirq steal ..."."""
    ticks = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))
