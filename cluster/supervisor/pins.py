"""Pins of the fleet: the supervisor remembers them, and gives them to every worker that is to hold them.

They are stored in Ray, as incarnations are, so that they outlive supervisor, routers and workers. A worker gets its
pins when it begins to serve or a supervisor does, and lets go what is not stored: a supervisor may die between the two.
A new pin that one of its workers refuses is held by none. A worker that does not answer is given it again and again,
until it holds or refuses it, or its epoch ends.

What is wanted changes in one turn of the event loop, without waiting for anybody. Then the workers are brought to it,
all at once, with one call after the other to each. What a call is to do is looked up when its turn has come. So a
worker that does not answer delays no other worker, and no command but those that it takes part in.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import grpc.aio

from cluster.supervisor import stored_pins
from cluster.supervisor.actors import Serving
from cluster.supervisor.stored_pins import PinStore
from twostroke.config import Role
from twostroke.errors import FingerprintMismatch, InvalidRequest, NotFound, PeerLost, PinRefused, ServeError
from twostroke.fault_points import Point, reach
from twostroke.kv_cache.block import HASH_BYTES
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import pins_pb2, pins_pb2_grpc
from twostroke.rpc.v1.worker_pb2 import PageSource

log = logging.getLogger(__name__)

MOST_PINS = 256
MOST_TOKENS = 1 << 20
"""Tokens of all pins together: some megabytes in Ray's store."""
MOST_LISTED_HINTS = 4096
"""Cache hints in one list: some hundred bytes each."""
CALL_S = 3.0
"""Seconds for a worker to answer, and for earlier calls to it to end; none of the calls computes anything."""
GIVE_AGAIN_S = 2.0
"""Seconds after which a worker that did not take its pins is tried again; each further pause is half as long again."""
LONGEST_PAUSE_S = 60.0
"""Seconds to which those pauses grow, for as long as the epoch serves."""
ALL = "all"
PIN_ID = re.compile(r"[0-9a-f]{1,32}")

_REFUSALS = (PinRefused, InvalidRequest, FingerprintMismatch)
"""What a worker raises that will not take the pin; any other error means that it is away."""
Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply")


class PinHolder(NamedTuple):
    """A worker of the fleet."""

    worker_id: str
    role: Role
    serving: Serving | None
    """None while it does not serve."""


@dataclass(frozen=True, slots=True)
class _NewPin:
    """A pin that is given to its workers and not stored yet."""

    pin: pins_pb2.Pin
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is stored or given up."""


class FleetPins(pins_pb2_grpc.PinsServicer):
    def __init__(
        self,
        holders: Callable[[], Sequence[PinHolder]],
        store: PinStore,
        membership: Membership,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`holders` returns all workers of the fleet. `clock`: Unix seconds."""
        self._holders = holders
        self._store = store
        self._membership = membership
        self._clock = clock
        self._pins = stored_pins.kept(store)
        self._problems: dict[tuple[str, str], str] = {}
        """Why a worker did not take a pin when it was given its pins, by worker and pin."""
        self._new_pins: dict[str, _NewPin] = {}
        """Pins that workers may hold though they are not stored yet, by their ids."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One call after the other to each worker, by its id: it has in the end what the last one gave it."""
        self._behind: set[str] = set()
        """Workers that missed a change since they were last given all of their pins, or since that began."""
        self._unanswered: dict[str, str] = {}
        """Why a worker that serves could not be given its pins, by worker."""
        self._giving: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Epochs that are given their pins again, after a pause, by worker and epoch."""
        self._changes: set[asyncio.Task[Any]] = set()
        """Changes that are under way: they end whatever their callers do."""

    async def Put(  # noqa: N802
        self, request: pins_pb2.PutPinRequest, context: Context
    ) -> pins_pb2.PutPinResponse:
        """Raises PinRefused, InvalidRequest, NotFound or PeerLost (of the store); then no worker holds the new pin.

        A call that is cancelled changes all or nothing, too.
        """
        return await self._whole(self._put_and_keep(request))

    async def Remove(  # noqa: N802
        self, request: pins_pb2.RemovePinRequest, context: Context
    ) -> pins_pb2.RemovePinResponse:
        """Workers that do not answer lose the pin as soon as they do. Raises PeerLost where the store does not."""
        return await self._whole(self._remove(request))

    async def List(  # noqa: N802
        self, request: pins_pb2.ListPinsRequest, context: Context
    ) -> pins_pb2.ListPinsResponse:
        """What every worker says of its pins, and the pins that workers shall hold and do not.

        It has the cache hints only where they are asked for, `MOST_LISTED_HINTS` of them; each worker says how many.
        """
        self._expire()
        replies = await asyncio.gather(*(self._listed(request, each) for each in self._serving()))
        response = pins_pb2.ListPinsResponse()
        for reply in replies:
            response.uses.extend(reply.uses)
            response.held.extend(held for held in reply.held if not held.is_hint)
        hints = (held for reply in replies for held in reply.held if held.is_hint)
        response.held.extend(itertools.islice(hints, MOST_LISTED_HINTS))
        reported = {(held.pin_id, held.worker_id) for held in response.held}
        for pin in self._pins.values():
            for holder in self._holders():
                if _lies_at(pin, holder) and (pin.pin_id, holder.worker_id) not in reported:
                    problem = self._problems.get((holder.worker_id, pin.pin_id), "")
                    unanswered = "" if holder.serving is None else self._unanswered.get(holder.worker_id, "")
                    response.held.append(_absent(pin, holder.worker_id, problem, unanswered))
        return response

    async def give(self, worker_id: str) -> None:
        """Let a worker that has begun to serve hold its pins; return when it does, or its epoch has ended."""
        await self._give(worker_id, self._epoch(worker_id))

    async def stop(self) -> None:
        """End what is under way; nothing is given or changed afterwards."""
        tasks = [*self._giving.values(), *self._changes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Internals

    async def _whole(self, change: Coroutine[Any, Any, Reply]) -> Reply:
        """Carry out a change to its end, also if the caller goes away meanwhile."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    async def _put_and_keep(self, request: pins_pb2.PutPinRequest) -> pins_pb2.PutPinResponse:
        pin = request.pin
        while (earlier := self._new_pins.get(pin.pin_id)) is not None:
            await earlier.ended.wait()
        self._expire()
        self._choose_workers(request, self._holders())
        self._check_room(pin)
        known = self._pins.get(pin.pin_id)
        try:
            with self._wanting(pin):
                held = await self._put_everywhere(pin)
                reach(Point.SUPERVISOR_PINNING)
                stored_pins.keep(self._store, pin)
                self._pins[pin.pin_id] = pin
        except ServeError:
            touched = [pin] if known is None else [pin, known]
            where = [each for each in self._serving() if any(_lies_at(one, each) for one in touched)]
            await self._bring_all(pin.pin_id, where)
            raise
        if known is not None:
            await self._bring_all(pin.pin_id, [each for each in self._serving() if not _lies_at(pin, each)])
        log.info("pin kept pin=%s owner=%s workers=%s", pin.pin_id, pin.owner, ",".join(pin.workers))
        reach(Point.SUPERVISOR_PINNED)
        return pins_pb2.PutPinResponse(held=held)

    @contextlib.contextmanager
    def _wanting(self, pin: pins_pb2.Pin) -> Iterator[None]:
        """Let workers hold a pin that is not stored yet."""
        new = self._new_pins[pin.pin_id] = _NewPin(pin)
        try:
            yield
        finally:
            del self._new_pins[pin.pin_id]
            new.ended.set()

    async def _remove(self, request: pins_pb2.RemovePinRequest) -> pins_pb2.RemovePinResponse:
        def is_meant(pin: pins_pb2.Pin | pins_pb2.HeldPin) -> bool:
            return pin.pin_id == request.pin_id if request.pin_id else pin.owner == request.owner

        for new in [each for each in self._new_pins.values() if is_meant(each.pin)]:
            await new.ended.wait()
        ids = [pin_id for pin_id, pin in self._pins.items() if is_meant(pin)]
        for pin_id in ids:
            self._forget(pin_id)
        reach(Point.SUPERVISOR_UNPINNING)
        taken = await asyncio.gather(*(self._take_back(each) for each in self._serving()))
        return pins_pb2.RemovePinResponse(removed=max(len(ids), *(sum(map(is_meant, held)) for held in taken), 0))

    async def _give(self, worker_id: str, epoch: str | None) -> None:
        """Give one epoch of a worker its pins, again and again with growing pauses, until it has them or ends."""
        pause_s = GIVE_AGAIN_S
        while epoch is not None and self._epoch(worker_id) == epoch:
            self._expire()
            holder = self._served_by(worker_id)
            if holder is None or await self._given(holder):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 1.5 * pause_s)

    def _give_again(self, holder: PinHolder, problem: str) -> None:
        """Let a worker that did not answer have its pins later."""
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
        """Bring one worker to what is wanted: all of its pins, and no other. Return False if it is away or behind."""
        self._behind.discard(holder.worker_id)
        reach(Point.SUPERVISOR_GIVING_PINS)
        try:
            await self._take_others(holder)
            new_pins = [new.pin for new in self._new_pins.values()]
            ids = {pin.pin_id for pin in (*self._pins.values(), *new_pins) if _lies_at(pin, holder)}
            for pin_id in ids:
                await self._bring_or_note(pin_id, holder)
        except ServeError as error:
            log.warning("pins not given worker=%s error=%s", holder.worker_id, error.message)
            self._unanswered[holder.worker_id] = error.message
            return False
        if holder.worker_id in self._behind:
            return False
        self._unanswered.pop(holder.worker_id, None)
        if ids:
            log.info("pins given worker=%s pins=%d", holder.worker_id, len(ids))
        return True

    async def _bring_or_note(self, pin_id: str, holder: PinHolder) -> None:
        """Bring a worker to what is wanted of a pin, or note why it refuses. Raises ServeError if it is away."""
        self._problems.pop((holder.worker_id, pin_id), None)
        try:
            await self._bring(pin_id, holder)
        except _REFUSALS as error:
            log.warning("pin refused worker=%s pin=%s error=%s", holder.worker_id, pin_id, error.message)
            self._problems[holder.worker_id, pin_id] = error.message

    async def _take_back(self, holder: PinHolder) -> list[pins_pb2.HeldPin]:
        """Take back what a worker is not to hold, and return it; later, if the worker is away."""
        try:
            return await self._take_others(holder)
        except ServeError as error:
            log.warning("pins not removed worker=%s error=%s", holder.worker_id, error.message)
            self._give_again(holder, error.message)
            return []

    async def _take_others(self, holder: PinHolder) -> list[pins_pb2.HeldPin]:
        """Take back the pins that a worker is not to hold, and return them. Raises ServeError if it is away.

        It has some where they were removed, where it did not answer while they were undone or removed, or where a
        supervisor died before it had stored them, or before it had told the worker that they were removed.
        """
        assert holder.serving is not None
        async with self._turn(holder):
            listed: pins_pb2.ListPinsResponse = await self._call(
                holder.serving.address, "List", pins_pb2.ListPinsRequest()
            )
        others = [held for held in listed.held if self._wanted(held.pin_id, holder) is None]
        for held in others:
            log.info("pin taken back worker=%s pin=%s", holder.worker_id, held.pin_id)
            await self._bring(held.pin_id, holder)
        return others

    async def _put_everywhere(self, pin: pins_pb2.Pin) -> list[pins_pb2.HeldPin]:
        """Put a new pin on all of its workers that serve. Raises what the first one says that refuses it.

        Those that do not answer are given it again later.
        """
        holders = [each for each in self._holders() if _lies_at(pin, each)]
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
                held.append(_absent(pin, holder.worker_id, unanswered=result.message))
            else:
                raise result
        return held

    async def _put_new(self, pin: pins_pb2.Pin, holder: PinHolder) -> pins_pb2.HeldPin:
        if holder.serving is None:
            return _absent(pin, holder.worker_id)
        async with self._turn(holder):
            return await self._put(pin, holder)

    async def _bring_all(self, pin_id: str, holders: Sequence[PinHolder]) -> None:
        """Bring workers to what is wanted of a pin, all at once; those that are away, or refuse that, later."""
        results = await asyncio.gather(*(self._bring(pin_id, each) for each in holders), return_exceptions=True)
        for holder, result in zip(holders, results, strict=True):
            if isinstance(result, ServeError):
                log.warning("pin not changed worker=%s pin=%s error=%s", holder.worker_id, pin_id, result.message)
                self._give_again(holder, result.message)
            elif result is not None:
                raise result

    async def _bring(self, pin_id: str, holder: PinHolder) -> None:
        """Bring a worker to what is wanted of a pin: it holds that, or none. Raises ServeError."""
        async with self._turn(holder):
            serving = self._served_by(holder.worker_id)
            if serving is None or serving.serving is None:
                return
            pin = self._wanted(pin_id, serving)
            if pin is not None:
                await self._put(_as_known_by(serving, pin), serving)
            else:
                await self._call(serving.serving.address, "Remove", pins_pb2.RemovePinRequest(pin_id=pin_id))

    def _wanted(self, pin_id: str, holder: PinHolder) -> pins_pb2.Pin | None:
        """Return the pin of this id that a worker is to hold, or None."""
        new = self._new_pins.get(pin_id)
        pin = self._pins.get(pin_id) if new is None else new.pin
        return pin if pin is not None and _lies_at(pin, holder) else None

    @contextlib.asynccontextmanager
    async def _turn(self, holder: PinHolder) -> AsyncIterator[None]:
        """Let earlier calls to a worker end first. Raises PeerLost where they do not."""
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
        assert holder.serving is not None
        request = pins_pb2.PutPinRequest(pin=pin, source=self._source(pin, holder))
        reply: pins_pb2.PutPinResponse = await self._call(holder.serving.address, "Put", request)
        return reply.held[0]

    async def _listed(self, request: pins_pb2.ListPinsRequest, holder: PinHolder) -> pins_pb2.ListPinsResponse:
        assert holder.serving is not None
        try:
            reply: pins_pb2.ListPinsResponse = await self._call(holder.serving.address, "List", request)
        except ServeError as error:
            log.warning("pins not listed worker=%s error=%s", holder.worker_id, error.message)
            return pins_pb2.ListPinsResponse()
        return reply

    async def _call(self, address: str, method: str, request: Any) -> Any:
        channel = PeerChannel(address, self._membership)
        try:
            return await channel.call(getattr(pins_pb2_grpc.PinsStub(channel.channel), method), request, CALL_S)
        finally:
            await channel.close()

    def _source(self, pin: pins_pb2.Pin, holder: PinHolder) -> PageSource | None:
        """Return the prefill worker that computes for a decode worker: the same one for all holders of a pin."""
        if holder.role is Role.PREFILL:
            return None
        sources = [each for each in self._serving() if each.role is Role.PREFILL]
        holding = [each for each in sources if _lies_at(pin, each)] or sources
        if not holding:
            return None
        source = holding[int(pin.pin_id, 16) % len(holding)]
        assert source.serving is not None
        return PageSource(worker_id=source.worker_id, address=source.serving.address, epoch=source.serving.epoch)

    def _choose_workers(self, request: pins_pb2.PutPinRequest, holders: Sequence[PinHolder]) -> None:
        """Write into the pin where it is to lie. Raises InvalidRequest or NotFound for what is no worker."""
        pin = request.pin
        if request.per_role:
            if pin.workers:
                raise InvalidRequest("name workers, or how many of each role, not both", field="workers")
            for role in (Role.PREFILL, Role.DECODE):
                pin.workers.extend([each.worker_id for each in holders if each.role is role][: request.per_role])
        if not pin.workers:
            pin.workers.append(ALL)
        known = {ALL, Role.PREFILL.value, Role.DECODE.value, *(each.worker_id for each in holders)}
        for name in pin.workers:
            if name not in known:
                raise NotFound(f"there is no worker {name!r}; there are {', '.join(sorted(known))}", field="workers")

    def _check_room(self, pin: pins_pb2.Pin) -> None:
        if PIN_ID.fullmatch(pin.pin_id) is None or len(pin.block_hashes) < HASH_BYTES:
            raise InvalidRequest("a pin needs an id of hexadecimal digits, and a block", field="pin_id")
        all_pins = self._pins | {pin_id: new.pin for pin_id, new in self._new_pins.items()}
        others = [each for pin_id, each in all_pins.items() if pin_id != pin.pin_id]
        if len(others) >= MOST_PINS:
            raise PinRefused(f"the fleet has {len(others)} pins, and keeps at most {MOST_PINS}", field="pins")
        tokens = sum(len(each.tokens) for each in others)
        if tokens + len(pin.tokens) > MOST_TOKENS:
            raise PinRefused(
                f"the pin has {len(pin.tokens)} tokens; the fleet's pins have {tokens} and may have {MOST_TOKENS}",
                field="pins",
            )

    def _forget(self, pin_id: str) -> None:
        """Raises PeerLost where the store does not answer; the pin is remembered then."""
        self._store.set_pin(pin_id, None)
        del self._pins[pin_id]
        for key in [key for key in self._problems if key[1] == pin_id]:
            del self._problems[key]

    def _expire(self) -> None:
        """Forget pins whose time is over. Workers end them by their own clocks: one that stays stored does no harm."""
        now_s = self._clock()
        for pin_id in [key for key, pin in self._pins.items() if pin.HasField("expires_s") and pin.expires_s <= now_s]:
            try:
                self._forget(pin_id)
            except ServeError as error:
                log.warning("expired pin not deleted pin=%s error=%s", pin_id, error.message)

    def _serving(self) -> list[PinHolder]:
        return [each for each in self._holders() if each.serving is not None]

    def _served_by(self, worker_id: str) -> PinHolder | None:
        """Return a worker if it serves."""
        return next((each for each in self._serving() if each.worker_id == worker_id), None)

    def _epoch(self, worker_id: str) -> str | None:
        holder = self._served_by(worker_id)
        return None if holder is None or holder.serving is None else holder.serving.epoch


def _as_known_by(holder: PinHolder, pin: pins_pb2.Pin) -> pins_pb2.Pin:
    """Return a pin for a worker of this fleet, whose weights may be other ones than when the pin was made."""
    own = pins_pb2.Pin()
    own.CopyFrom(pin)
    if holder.serving is not None:
        own.fingerprint = holder.serving.fingerprint
    return own


def _lies_at(pin: pins_pb2.Pin, holder: PinHolder) -> bool:
    return any(name in (ALL, holder.role.value, holder.worker_id) for name in pin.workers)


def _log_failure(change: asyncio.Task[Any]) -> None:
    """Log what nobody hears any more."""
    if not change.cancelled() and (error := change.exception()) is not None:
        log.warning("pins not changed error=%s", error)


def _absent(pin: pins_pb2.Pin, worker_id: str, problem: str = "", unanswered: str = "") -> pins_pb2.HeldPin:
    """A pin at a worker that does not hold it: it is away, or has not answered, or has refused it (`problem`)."""
    return pins_pb2.HeldPin(
        worker_id=worker_id,
        pin_id=pin.pin_id,
        owner=pin.owner,
        tenant=pin.tenant,
        text=pin.text,
        state=pins_pb2.PIN_STATE_FAILED if problem else pins_pb2.PIN_STATE_AWAY,
        blocks=len(pin.block_hashes) // HASH_BYTES,
        expires_s=pin.expires_s if pin.HasField("expires_s") else None,
        problem=problem or (unanswered and f"it is given again and again, as the worker did not answer: {unanswered}"),
    )
