"""A transport that injects faults by plan into another one: for tests of whatever pulls pages.

plan = FaultPlan({0: Fail("link down"), 2: FlipByte(copy=0, offset=17)})
transport = FakeTransport(TcpTransport("127.0.0.1"), plan)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from twostroke.base.errors import PeerLost
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.transfer.base import (
    Identity,
    PageCopy,
    PageEndpoint,
    PageTransport,
    Peer,
    ReadOutcome,
    Transfer,
    TransferResult,
)
from twostroke.transfer.pulls import check_copies

_WRITE_EVERY_S = 0.001
"""How often a late writer writes."""
_NEVER_S = 3600.0


@dataclass(frozen=True, slots=True)
class Fail:
    """Nothing is copied, the transfer fails at once."""

    reason: str = "injected"


@dataclass(frozen=True, slots=True)
class Delay:
    """The transfer takes this much longer; past its deadline it expires."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Expire:
    """Nothing is copied, the transfer hangs until its deadline."""


@dataclass(frozen=True, slots=True)
class FlipByte:
    """The transfer is DONE, but one byte of the local page of its `copy`-th copy is wrong."""

    copy: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class WriteLate:
    """The transfer expires, and its local pages keep being written to until it is fenced."""


Fault = Fail | Delay | Expire | FlipByte | WriteLate


@dataclass(slots=True)
class FaultPlan:
    """What happens to the k-th transfer and the k-th connect of a FakeTransport, counted from 0."""

    transfers: Mapping[int, Fault] = field(default_factory=dict)
    every_transfer: Fault | None = None
    """For transfers that have no fault of their own."""
    lost_connects: frozenset[int] = frozenset()
    """These connects raise PeerLost."""
    pulls: int = 0
    """Transfers started so far."""
    connects: int = 0

    def next_transfer(self) -> Fault | None:
        self.pulls += 1
        return self.transfers.get(self.pulls - 1, self.every_transfer)

    def next_connect_is_lost(self) -> bool:
        self.connects += 1
        return self.connects - 1 in self.lost_connects


@dataclass(eq=False, slots=True)
class _FakeTransfer(Transfer):
    copies: tuple[PageCopy, ...]
    deadline_at: float
    fault: Fault | None
    inner: Transfer | None
    """None where nothing is really copied."""
    fenced: asyncio.Event = field(default_factory=asyncio.Event)


class FakeTransport(PageTransport):
    """Behaves, and is called, like the transport it wraps, except where the plan says otherwise."""

    def __init__(self, inner: PageTransport, plan: FaultPlan | None = None) -> None:
        self.name = inner.name
        self.plan = plan or FaultPlan()
        self._inner = inner
        self._memory: PageMemory | None = None
        self._late_writers: set[_FakeTransfer] = set()

    async def open(self, memory: Pages, identity: Identity) -> PageEndpoint:
        assert isinstance(memory, PageMemory), "faults are injected into host memory"
        self._memory = memory
        return await self._inner.open(memory, identity)

    def read_into(self, memory: Pages, identity: Identity) -> None:
        assert isinstance(memory, PageMemory), "faults are injected into host memory"
        self._memory = memory
        self._inner.read_into(memory, identity)

    @property
    def refused(self) -> Mapping[str, int]:
        return self._inner.refused

    def reaches(self, endpoint: PageEndpoint) -> bool:
        return self._inner.reaches(endpoint)

    async def connect(self, endpoint: PageEndpoint, deadline_s: float) -> Peer:
        if self.plan.next_connect_is_lost():
            raise PeerLost(f"{endpoint.address}: injected")
        return await self._inner.connect(endpoint, deadline_s)

    def pull(self, peer: Peer, copies: Sequence[PageCopy], deadline_s: float) -> Transfer:
        assert self._memory is not None, "pull before open"
        check_copies(copies, peer.endpoint, self._memory)
        fault = self.plan.next_transfer()
        is_copied = not isinstance(fault, Fail | Expire | WriteLate)
        inner = self._inner.pull(peer, copies, deadline_s) if is_copied else None
        transfer = _FakeTransfer(tuple(copies), time.monotonic() + deadline_s, fault, inner)
        if isinstance(fault, WriteLate):
            self._late_writers.add(transfer)
            self._write_late(transfer)
        return transfer

    async def wait(self, transfer: Transfer) -> TransferResult:
        assert isinstance(transfer, _FakeTransfer)
        match transfer.fault:
            case Fail(reason):
                return TransferResult(ReadOutcome.FAILED, 0, 0.0, reason)
            case Expire() | WriteLate():
                return await _hang(transfer, _NEVER_S)
            case Delay(seconds):
                hung = await _hang(transfer, seconds)
                return await self._wait_inner(transfer) if hung.outcome is ReadOutcome.DONE else hung
            case FlipByte(copy, offset):
                result = await self._wait_inner(transfer)
                self._page(transfer.copies[copy])[offset] ^= 0xFF
                return result
            case None:
                return await self._wait_inner(transfer)

    async def fence(self, transfer: Transfer) -> None:
        assert isinstance(transfer, _FakeTransfer)
        transfer.fenced.set()
        self._late_writers.discard(transfer)
        if transfer.inner is not None:
            await self._inner.fence(transfer.inner)

    async def close(self) -> None:
        self._late_writers.clear()
        await self._inner.close()

    async def _wait_inner(self, transfer: _FakeTransfer) -> TransferResult:
        assert transfer.inner is not None
        return await self._inner.wait(transfer.inner)

    def _write_late(self, transfer: _FakeTransfer) -> None:
        if transfer not in self._late_writers:
            return
        for copy in transfer.copies:
            self._page(copy)[:] += 1
        asyncio.get_running_loop().call_later(_WRITE_EVERY_S, self._write_late, transfer)

    def _page(self, copy: PageCopy) -> npt.NDArray[np.uint8]:
        assert self._memory is not None
        return self._memory.page(copy.local)


async def _hang(transfer: _FakeTransfer, seconds: float) -> TransferResult:
    """Lets `seconds` pass: DONE; unless the deadline comes first, or a fence."""
    started = time.monotonic()
    left_s = transfer.deadline_at - started
    try:
        await asyncio.wait_for(transfer.fenced.wait(), max(0.0, min(seconds, left_s)))
    except TimeoutError:
        outcome = ReadOutcome.DONE if seconds < left_s else ReadOutcome.EXPIRED
        return TransferResult(outcome, 0, time.monotonic() - started, "injected")
    return TransferResult(ReadOutcome.FAILED, 0, time.monotonic() - started, "fenced")
