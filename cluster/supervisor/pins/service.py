"""Answers the calls that put, remove and list the fleet's pins."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc.aio

from cluster.supervisor.backend import MessageStore
from cluster.supervisor.fleet import SupervisedFleet
from cluster.supervisor.pins.giving import PinDelivery
from cluster.supervisor.pins.wanted import PinHolder, WantedPins, choose_workers, lies_at
from cluster.supervisor.reconcile.plan import WorkerStage
from twostroke.base.errors import ServeError
from twostroke.base.fault_points import Point, reach
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import fleet_pb2, pins_pb2, pins_pb2_grpc

log = logging.getLogger(__name__)

MOST_LISTED_HINTS = 4096
"""Cache hints in one list: some hundred bytes each."""
Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply")


class FleetPins(pins_pb2_grpc.PinsServicer):
    """The pins of the fleet, which the supervisor keeps as one of its branches."""

    service = "Pins"

    def __init__(
        self,
        holders: Callable[[], Sequence[PinHolder]],
        store: MessageStore,
        membership: Membership,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`holders` returns all workers of the fleet. `clock`: Unix seconds."""
        self._holders = holders
        self._clock = clock
        self._wanted = WantedPins(store)
        self._delivery = PinDelivery(self._wanted, holders, membership, clock)
        self._changes: set[asyncio.Task[Any]] = set()
        """Changes that are under way: they end whatever their callers do."""

    @classmethod
    def of(cls, fleet: SupervisedFleet, store: MessageStore, membership: Membership) -> FleetPins:
        """Returns the pins of a fleet, whose workers hold them unless they have left."""

        def holders() -> list[PinHolder]:
            here = (worker for worker in fleet.workers() if worker.observed.stage is not WorkerStage.DRAINED)
            return [PinHolder(worker.worker_id, worker.role, worker.serving_now) for worker in here]

        return cls(holders, store, membership)

    def add_to(self, server: grpc.aio.Server) -> None:
        pins_pb2_grpc.add_PinsServicer_to_server(self, server)

    def add_to_view(self, view: fleet_pb2.FleetView) -> None:
        """Adds nothing: routers ask for pins when an operator does."""

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
        """Returns what every worker reports of its pins, and the pins that workers should hold and do not.

        It has the cache hints only where they are asked for, `MOST_LISTED_HINTS` of them; each worker says how many.
        """
        self._wanted.expire(self._clock())
        replies = await asyncio.gather(*(self._delivery.listed(request, each) for each in self._delivery.serving()))
        response = pins_pb2.ListPinsResponse()
        for reply in replies:
            response.uses.extend(reply.uses)
            response.held.extend(held for held in reply.held if not held.is_hint)
        hints = (held for reply in replies for held in reply.held if held.is_hint)
        response.held.extend(itertools.islice(hints, MOST_LISTED_HINTS))
        reported = {(held.pin_id, held.worker_id) for held in response.held}
        for pin in self._wanted.stored():
            for holder in self._holders():
                if lies_at(pin, holder) and (pin.pin_id, holder.worker_id) not in reported:
                    response.held.append(self._delivery.absent(pin, holder))
        return response

    async def begun(self, worker_id: str) -> None:
        """Lets a worker that has begun to serve hold its pins; returns when it does, or its epoch has ended."""
        await self._delivery.give(worker_id)

    async def stop(self) -> None:
        """Ends what is under way; nothing is given or changed afterwards."""
        tasks = list(self._changes)
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._delivery.stop(), *tasks, return_exceptions=True)

    async def _whole(self, change: Coroutine[Any, Any, Reply]) -> Reply:
        """Carries out a change to its end, even if the caller disconnects meanwhile."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    async def _put_and_keep(self, request: pins_pb2.PutPinRequest) -> pins_pb2.PutPinResponse:
        pin, wanted, delivery = request.pin, self._wanted, self._delivery
        await wanted.until_ended(pin.pin_id)
        wanted.expire(self._clock())
        choose_workers(request, self._holders())
        wanted.check_room(pin)
        known = wanted.known(pin.pin_id)
        try:
            with wanted.wanting(pin):
                held = await delivery.put_everywhere(pin)
                reach(Point.SUPERVISOR_PINNING)
                wanted.keep(pin)
        except ServeError:
            touched = [pin] if known is None else [pin, known]
            where = [each for each in delivery.serving() if any(lies_at(one, each) for one in touched)]
            await delivery.bring_all(pin.pin_id, where)
            raise
        if known is not None:
            await delivery.bring_all(pin.pin_id, [each for each in delivery.serving() if not lies_at(pin, each)])
        log.info("pin kept pin=%s owner=%s workers=%s", pin.pin_id, pin.owner, ",".join(pin.workers))
        reach(Point.SUPERVISOR_PINNED)
        return pins_pb2.PutPinResponse(held=held)

    async def _remove(self, request: pins_pb2.RemovePinRequest) -> pins_pb2.RemovePinResponse:
        def is_meant(pin: pins_pb2.Pin | pins_pb2.HeldPin) -> bool:
            return pin.pin_id == request.pin_id if request.pin_id else pin.owner == request.owner

        for new in [each for each in self._wanted.new() if is_meant(each.pin)]:
            await new.ended.wait()
        ids = [pin.pin_id for pin in self._wanted.stored() if is_meant(pin)]
        for pin_id in ids:
            self._wanted.forget(pin_id)
        reach(Point.SUPERVISOR_UNPINNING)
        taken = await asyncio.gather(*(self._delivery.take_back(each) for each in self._delivery.serving()))
        return pins_pb2.RemovePinResponse(removed=max(len(ids), *(sum(map(is_meant, held)) for held in taken), 0))


def _log_failure(change: asyncio.Task[Any]) -> None:
    """Logs what nobody hears any more."""
    if not change.cancelled() and (error := change.exception()) is not None:
        log.warning("pins not changed error=%s", error)
