"""Long streams on whoever is frozen or cut off: they go on elsewhere, and it meets them when it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from tests.trials.chaos.faults.answer import Transcript
from tests.trials.chaos.faults.client import Clients
from tests.trials.chaos.faults.load import Ask

LATE_S = 0.3
"""After the fault; what still comes then was sent before it."""
STALLED_S = 1.2
"""After the fault; whoever waits for death or for a frozen router has got nothing by then."""
AWAKE_S = 0.7
"""For which a process that is back is watched."""
BEGIN_S = 5.0
"""For all to have a first token."""
POLL_S = 0.05


@dataclass(slots=True)
class LongStreams:
    clients: Clients
    asks: Sequence[Ask]
    _open: dict[asyncio.Task[Transcript], tuple[Transcript, asyncio.Event]] = field(default_factory=dict)
    _over: list[Transcript] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def lasting(self) -> AsyncIterator[LongStreams]:
        try:
            yield self
        finally:
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def be_there(self, *, afresh: bool) -> None:
        """All stream, from every router and, as far as it may be, every decode worker: one begins after the other.

        `afresh`: also where some do already, so that a worker that has just begun gets one, and all are short.
        """
        if not afresh and any(not task.done() for task in self._open):
            return
        await self._leave()
        for at, ask in enumerate(self.asks):
            transcript, leave = Transcript(ask.name, time.time()), asyncio.Event()
            task = asyncio.create_task(self.clients.follow(ask, at, into=transcript, leave=leave))
            self._open[task] = (transcript, leave)
            give_up_s = time.monotonic() + BEGIN_S
            while not (transcript.tokens or task.done() or time.monotonic() > give_up_s):  # as clients do
                await asyncio.sleep(POLL_S)

    def release(self, fault_s: float) -> None:
        """Lets those go that were elsewhere."""
        for transcript, leave in self._open.values():
            if not has_stalled(transcript, fault_s):
                leave.set()

    async def end(self, back_s: float) -> list[Transcript]:
        """All that there were, some time after the return of what was broken."""
        await asyncio.sleep(back_s + AWAKE_S - time.time())
        await self._leave()
        return self._over

    async def _leave(self) -> None:
        for _, leave in self._open.values():
            leave.set()
        await asyncio.gather(*self._open)
        self._over += [task.result() for task in self._open]
        self._open.clear()


def has_stalled(transcript: Transcript, fault_s: float) -> bool:
    """It was with whoever was broken."""
    heard = any(fault_s + LATE_S < at < fault_s + STALLED_S for at in transcript.arrivals_s)
    return transcript.began_s < fault_s < transcript.ended_s + LATE_S and not heard


def met(streams: Sequence[Transcript], fault_s: float, back_s: float) -> int:
    """How many were with whoever was broken, went on elsewhere before it was back, and still did afterwards."""
    return sum(
        has_stalled(each, fault_s)
        and any(fault_s + STALLED_S <= at < back_s for at in each.arrivals_s)
        and each.ended_s > back_s
        for each in streams
    )
