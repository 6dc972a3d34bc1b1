"""Brings workers to the pins that are wanted of them, with one call after the other to each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from cluster.supervisor.pins.wanted import PinHolder, WantedPins, absent, lies_at, source_for
from twostroke.base.errors import FingerprintMismatch, InvalidRequest, PeerLost, PinRefused, ServeError
from twostroke.base.fault_points import Point, reach
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import pins_pb2, pins_pb2_grpc
from twostroke.rpc.v1.worker_pb2 import PageSource

log = logging.getLogger(__name__)

CALL_S = 3.0
"""Seconds for a worker to answer, and for earlier calls to it to end; none of the calls computes anything."""
GIVE_AGAIN_S = 2.0
"""Seconds after which a worker that did not take its pins is tried again; each further pause is half as long again."""
LONGEST_PAUSE_S = 60.0
"""Longest pause in seconds between two tries, which go on for as long as the epoch serves."""

_REFUSALS = (PinRefused, InvalidRequest, FingerprintMismatch)
"""What a worker raises that will not take the pin; any other error means that it is away."""


class PinDelivery:
    def __init__(
        self,
        wanted: WantedPins,
        holders: Callable[[], Sequence[PinHolder]],
        membership: Membership,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`holders` returns all workers of the fleet. `clock`: Unix seconds."""
        self._wanted = wanted
        self._holders = holders
        self._membership = membership
        self._clock = clock
        self._problems: dict[tuple[str, str], str] = {}
        """Why a worker did not take a pin when it was given its pins, by worker and pin."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One call after the other to each worker, by its id: it has in the end what the last one gave it."""
        self._behind: set[str] = set()
        """Workers that missed a change since they were last given all of their pins, or since that began."""
        self._unanswered: dict[str, str] = {}
        """Why a worker that serves could not be given its pins, by worker."""
        self._giving: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Epochs that are given their pins again, after a pause, by worker and epoch."""

    async def give(self, worker_id: str) -> None:
        """Lets a worker that has begun to serve hold its pins; returns when it does, or its epoch has ended."""
        await self._give(worker_id, self._epoch(worker_id))

    async def put_everywhere(self, pin: pins_pb2.Pin) -> list[pins_pb2.HeldPin]:
        """Puts a new pin on all of its workers that serve. Raises what the first one says that refuses it.

        Those that do not answer are given it again later.
        """
        holders = [each for each in self._holders() if lies_at(pin, each)]
        self._problems = {key: problem for key, problem in self._problems.items() if key[1] != pin.pin_id}
        results = await asyncio.gather(*(self._put_new(pin, each) for each in holders), return_exceptions=True)
        refusal = next((result for result in results if isinstance(result, _REFUSALS)), None)
        if refusal is not None:
            where = holders[results.index(refusal)].worker_id
            raise type(refusal)(f"{where}: {refusal.message}", field=refusal.field)
        held: list[pins_pb2.HeldPin] = []
        for holder, result in zip(holders, results, strict=True):
            if isinstance(result, pins_pb2.HeldPin):
                held.append(result)
            elif isinstance(result, ServeError):
                self._give_again(holder, result.message)
                held.append(absent(pin, holder.worker_id, unanswered=result.message))
            else:
                raise result
        return held

    async def bring_all(self, pin_id: str, holders: Sequence[PinHolder]) -> None:
        """Brings workers to what is wanted of a pin, all at once; those that are away, or refuse that, later."""
        results = await asyncio.gather(*(self._bring(pin_id, each) for each in holders), return_exceptions=True)
        for holder, result in zip(holders, results, strict=True):
            if isinstance(result, ServeError):
                log.warning("pin not changed worker=%s pin=%s error=%s", holder.worker_id, pin_id, result.message)
                self._give_again(holder, result.message)
            elif result is not None:
                raise result

    async def take_back(self, holder: PinHolder) -> list[pins_pb2.HeldPin]:
        """Takes back what a worker is not to hold, and returns it; later, if the worker is away."""
        try:
            return await self._take_others(holder)
        except ServeError as error:
            log.warning("pins not removed worker=%s error=%s", holder.worker_id, error.message)
            self._give_again(holder, error.message)
            return []

    async def listed(self, request: pins_pb2.ListPinsRequest, holder: PinHolder) -> pins_pb2.ListPinsResponse:
        """Returns what a worker that serves says about its pins; nothing where it does not answer."""
        try:
            reply: pins_pb2.ListPinsResponse = await self._call(holder, "List", request)
        except ServeError as error:
            log.warning("pins not listed worker=%s error=%s", holder.worker_id, error.message)
            return pins_pb2.ListPinsResponse()
        return reply

    def absent(self, pin: pins_pb2.Pin, holder: PinHolder) -> pins_pb2.HeldPin:
        """Describes a pin that this worker should hold and does not, with the reason."""
        problem = self._problems.get((holder.worker_id, pin.pin_id), "")
        unanswered = "" if holder.serving is None else self._unanswered.get(holder.worker_id, "")
        return absent(pin, holder.worker_id, problem, unanswered)

    def serving(self) -> list[PinHolder]:
        return [each for each in self._holders() if each.serving is not None]

    async def stop(self) -> None:
        """Gives nothing again."""
        tasks = list(self._giving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give(self, worker_id: str, epoch: str | None) -> None:
        """Gives one epoch of a worker its pins, again and again with growing pauses, until it has them or ends."""
        pause_s = GIVE_AGAIN_S
        while epoch is not None and self._epoch(worker_id) == epoch:
            self._wanted.expire(self._clock())
            holder = self._served_by(worker_id)
            if holder is None or await self._given(holder):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 1.5 * pause_s)

    def _give_again(self, holder: PinHolder, problem: str) -> None:
        """Lets a worker that did not answer have its pins later."""
        assert holder.serving is not None
        self._unanswered[holder.worker_id] = problem
        self._behind.add(holder.worker_id)
        key = holder.worker_id, holder.serving.epoch
        if key not in self._giving:
            self._giving[key] = asyncio.create_task(self._give_later(*key))

    async def _give_later(self, worker_id: str, epoch: str) -> None:
        try:
            await asyncio.sleep(GIVE_AGAIN_S)
            await self._give(worker_id, epoch)
        finally:
            del self._giving[worker_id, epoch]

    async def _given(self, holder: PinHolder) -> bool:
        """Brings one worker to what is wanted: all of its pins, and no other. Returns False if it is away or behind."""
        self._behind.discard(holder.worker_id)
        reach(Point.SUPERVISOR_GIVING_PINS)
        try:
            await self._take_others(holder)
            ids = self._wanted.ids_at(holder)
            for pin_id in ids:
                await self._bring_or_note(pin_id, holder)
        except ServeError as error:
            log.warning("pins not given worker=%s error=%s", holder.worker_id, error.message)
            self._unanswered[holder.worker_id] = error.message
            return False
        if holder.worker_id in self._behind:
            return False
        self._unanswered.pop(holder.worker_id, None)
        self._problems = {
            key: problem for key, problem in self._problems.items() if key[0] != holder.worker_id or key[1] in ids
        }
        if ids:
            log.info("pins given worker=%s pins=%d", holder.worker_id, len(ids))
        return True

    async def _bring_or_note(self, pin_id: str, holder: PinHolder) -> None:
        """Brings a worker to what is wanted of a pin, or notes why it refuses. Raises ServeError if it is away."""
        self._problems.pop((holder.worker_id, pin_id), None)
        try:
            await self._bring(pin_id, holder)
        except _REFUSALS as error:
            log.warning("pin refused worker=%s pin=%s error=%s", holder.worker_id, pin_id, error.message)
            self._problems[holder.worker_id, pin_id] = error.message

    async def _take_others(self, holder: PinHolder) -> list[pins_pb2.HeldPin]:
        """Takes back the pins that a worker is not to hold, and returns them. Raises ServeError if it is away.

        It has some where they were removed, where it did not answer while they were undone or removed, or where a
        supervisor died before it had stored them, or before it had told the worker that they were removed.
        """
        async with self._turn(holder):
            listed: pins_pb2.ListPinsResponse = await self._call(holder, "List", pins_pb2.ListPinsRequest())
        others = [held for held in listed.held if self._wanted.at(held.pin_id, holder) is None]
        for held in others:
            log.info("pin taken back worker=%s pin=%s", holder.worker_id, held.pin_id)
            await self._bring(held.pin_id, holder)
        return others

    async def _put_new(self, pin: pins_pb2.Pin, holder: PinHolder) -> pins_pb2.HeldPin:
        if holder.serving is None:
            return absent(pin, holder.worker_id)
        async with self._turn(holder):
            return await self._put(pin, holder)

    async def _bring(self, pin_id: str, holder: PinHolder) -> None:
        """Brings a worker to what is wanted of a pin: it holds that, or none. Raises ServeError."""
        async with self._turn(holder):
            serving = self._served_by(holder.worker_id)
            if serving is None:
                return
            pin = self._wanted.at(pin_id, serving)
            if pin is not None:
                await self._put(_as_known_by(serving, pin), serving)
            else:
                await self._call(serving, "Remove", pins_pb2.RemovePinRequest(pin_id=pin_id))

    @contextlib.asynccontextmanager
    async def _turn(self, holder: PinHolder) -> AsyncIterator[None]:
        """Lets earlier calls to a worker end first. Raises PeerLost where they do not."""
        turn = self._turns[holder.worker_id]
        try:
            async with asyncio.timeout(CALL_S):
                await turn.acquire()
        except TimeoutError:
            raise PeerLost(f"earlier calls to {holder.worker_id} take more than {CALL_S:g} s") from None
        try:
            yield
        finally:
            turn.release()

    async def _put(self, pin: pins_pb2.Pin, holder: PinHolder) -> pins_pb2.HeldPin:
        source = source_for(pin, holder, self.serving())
        request = pins_pb2.PutPinRequest(pin=pin, source=None if source is None else _page_source(source))
        reply: pins_pb2.PutPinResponse = await self._call(holder, "Put", request)
        return reply.held[0]

    async def _call(self, holder: PinHolder, method: str, request: Any) -> Any:
        assert holder.serving is not None
        channel = PeerChannel(holder.serving.address, self._membership)
        try:
            return await channel.call(getattr(pins_pb2_grpc.PinsStub(channel.channel), method), request, CALL_S)
        finally:
            await channel.close()

    def _served_by(self, worker_id: str) -> PinHolder | None:
        """Returns a worker if it serves."""
        return next((each for each in self.serving() if each.worker_id == worker_id), None)

    def _epoch(self, worker_id: str) -> str | None:
        holder = self._served_by(worker_id)
        return None if holder is None or holder.serving is None else holder.serving.epoch


def _as_known_by(holder: PinHolder, pin: pins_pb2.Pin) -> pins_pb2.Pin:
    """Returns a pin for a worker of this fleet, whose weights may be other ones than when the pin was made."""
    own = pins_pb2.Pin()
    own.CopyFrom(pin)
    if holder.serving is not None:
        own.fingerprint = holder.serving.fingerprint
    return own


def _page_source(holder: PinHolder) -> PageSource:
    assert holder.serving is not None
    return PageSource(worker_id=holder.worker_id, address=holder.serving.address, epoch=holder.serving.epoch)
