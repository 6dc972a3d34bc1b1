"""Asks routers to profile themselves and their workers, and puts the parts together process by process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc.aio

from cluster.clients.admin_access import AdminAccess
from twostroke.base.errors import ServeError
from twostroke.observability.profiler import KERNELS, KernelRecord
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.clock import introduced
from twostroke.rpc.profiles import ANSWER_S
from twostroke.rpc.v1 import control_pb2
from twostroke.rpc.v1.control_pb2_grpc import ControlStub

PRODUCTS = frozenset({"qkv", "output", "gate and up", "down", "head"})
"""Kernels that multiply with weights."""


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One kernel of a forward pass."""

    name: str
    start_ns: int
    end_ns: int
    bytes: float
    operations: float
    layer: int
    rows: int
    threads: int


@dataclass(slots=True)
class ProcessProfile:
    """What one process recorded."""

    name: str
    about: control_pb2.ProfiledProcess = field(default_factory=control_pb2.ProfiledProcess)
    """Its offset is that of the process's clock to the clock here."""
    slices: list[control_pb2.ProfileSlice] = field(default_factory=list)
    spans: list[control_pb2.TraceSpan] = field(default_factory=list)
    failure: str = ""
    """Why the profile is missing or ends early; else empty."""

    @property
    def seconds(self) -> float:
        return (self.about.end_ns - self.about.begin_ns) / 1e9

    def raise_limits(self) -> None:
        """Raises the limit of products to the best of this profile: what was reached once can be reached."""
        limits = self.about.limits
        if not limits.threads:
            return
        kernels = (kernel for piece in self.slices for kernel in kernels_of(piece) if kernel.name in PRODUCTS)
        reached = (kernel.operations / kernel.threads / max(1, kernel.end_ns - kernel.start_ns) for kernel in kernels)
        limits.operations_per_s = max(limits.operations_per_s, 1e9 * limits.threads * max(reached, default=0.0))

    def share_of_limit(self, kernel: KernelRun) -> float | None:
        """Returns the least time that the machine needs for the kernel, over the time that it took."""
        limits, seconds = self.about.limits, (kernel.end_ns - kernel.start_ns) / 1e9
        if not limits.threads or seconds <= 0:
            return None
        scale = kernel.threads / limits.threads
        least_s = max(kernel.bytes / limits.read_bytes_per_s, kernel.operations / limits.operations_per_s) / scale
        return least_s / seconds


def kernels_of(piece: control_pb2.ProfileSlice) -> Iterator[KernelRun]:
    for start_ns, end_ns, size_bytes, operations, kind, layer, rows, threads in KernelRecord.iter_unpack(piece.kernels):
        yield KernelRun(KERNELS[kind], start_ns, end_ns, size_bytes, operations, layer, rows, threads)


def collect(access: AdminAccess, seconds: float) -> list[ProcessProfile]:
    """Returns the profiles of all routers and workers. Raises ServeError if no router answers."""
    return asyncio.run(_collect(access, seconds))


async def _collect(access: AdminAccess, seconds: float) -> list[ProcessProfile]:
    found: dict[str, ProcessProfile] = {}
    asked = [
        _ask(address, access.token, control_pb2.ProfileRequest(seconds=seconds, alone=index > 0), found)
        for index, address in enumerate(access.addresses)
    ]
    errors = [error for error in await asyncio.gather(*asked) if error is not None]
    if len(errors) == len(asked):
        raise errors[0]
    for profile in found.values():
        profile.raise_limits()
    return list(found.values())


async def _ask(
    address: str, token: str, request: control_pb2.ProfileRequest, found: dict[str, ProcessProfile]
) -> ServeError | None:
    """Adds to `found` what one router tells. Returns the error that ended it."""
    channel = PeerChannel(address, token)
    try:
        _, clock = await introduced(channel)
        call = ControlStub(channel.channel).Profile(
            request, metadata=channel.metadata, timeout=request.seconds + 2 * ANSWER_S
        )
        async for part in call:
            profile = found.setdefault(part.process, ProcessProfile(part.process))
            if part.HasField("about"):
                profile.about = part.about
                profile.about.clock_offset_ns += clock.offset_ns
                profile.about.clock_error_ns += clock.error_ns
            profile.slices += part.slices
            profile.spans += part.spans
            profile.failure = part.failure
    except grpc.aio.AioRpcError as error:
        return error_of(error, address)
    except ServeError as error:
        return error
    finally:
        await channel.close()
    return None
