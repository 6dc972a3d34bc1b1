"""How far the monotonic clocks of two processes are apart, from calls that one of them answered."""

from __future__ import annotations

import functools
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.v1 import control_pb2
from twostroke.rpc.v1.control_pb2_grpc import ControlStub

READINGS = 8
"""Calls by which a clock is read: the fastest of them says most."""
CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Nanoseconds to add to another process's times to get ours."""

    offset_ns: int
    error_ns: int
    """The true offset is at most so far away, either way."""


@functools.cache
def machine_name() -> str:
    """Returns what two processes have in common that share a monotonic clock: the machine, since it booted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} (no boot id)"


async def introduced(channel: PeerChannel) -> tuple[control_pb2.ServerInfo, ClockOffset]:
    """Returns what the other process says about itself, and how far its clock is off. Raises ServeError."""
    best = ClockOffset(0, 1 << 62)
    for _ in range(READINGS):
        sent_ns = time.monotonic_ns()
        info = await channel.call(
            ControlStub(channel.channel).GetServerInfo, control_pb2.GetServerInfoRequest(), CALL_TIMEOUT_S
        )
        if info.machine == machine_name():
            return info, ClockOffset(0, 0)
        received_ns = time.monotonic_ns()
        reading = offset_of(sent_ns, info.clock_ns, received_ns)
        best = min(best, reading, key=lambda one: one.error_ns)
    return info, best


def offset_of(sent_ns: int, clock_ns: int, received_ns: int) -> ClockOffset:
    """Returns the offset by one reading: the other clock was read at some moment between sending and receiving."""
    return ClockOffset((sent_ns + received_ns) // 2 - clock_ns, -(-(received_ns - sent_ns) // 2))
