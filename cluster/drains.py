"""Lets workers leave: each drains, hands over what it can, and ends; a new life begins afterwards, or it stays away.

What is to become of whom is written down before anybody is told, so that a restarted supervisor goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc.aio

from cluster.actors import Serving
from cluster.ground import Departure, Ground, WorkerHandle
from cluster.plan import Stage
from twostroke.errors import PeerLost, ServeError
from twostroke.fault_points import Point, reach
from twostroke.rpc.channel import PeerChannel, call_timeout_s, error_of
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

log = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""For a drain whose caller is not known any more."""
SWITCH_S = 3.0
"""For a worker that becomes the other role to hand over what it has; what is left then goes on elsewhere all the same.
"""
END_S = 2.0
"""For the supervisor to hear of the end of a worker that has shut down or died; after that it is killed."""
ANSWER_S = 5.0
"""A worker that drains answers this long after its deadline, if it lives."""


class Fleet(Protocol):
    """What a drain needs of the supervisor."""

    def stage(self, worker_id: str) -> Stage:
        """Raises NotFound."""

    def enter(self, worker_id: str, stage: Stage) -> None: ...

    async def until(self, worker_id: str, is_so: Callable[[Stage], bool]) -> None:
        """Returns once the worker's stage is one that is meant."""

    def serving(self, worker_id: str) -> Serving: ...

    def heirs(self, worker_id: str) -> Sequence[control_pb2.Heir]:
        """Others of its role that serve."""

    def shall_switch(self, worker_id: str) -> bool:
        """It serves in another role than it shall."""

    def handle(self, worker_id: str) -> WorkerHandle: ...

    def wake(self) -> None:
        """Something is to be done: look at everybody."""


class Drains:
    """Those under way, each a task of `tasks`."""

    def __init__(self, fleet: Fleet, ground: Ground, us: Membership, shutdown_s: float) -> None:
        self._fleet = fleet
        self._ground = ground
        self._us = us
        self._shutdown_s = shutdown_s
        self._running: dict[str, asyncio.Task[int]] = {}

    async def drain(self, worker_id: str, deadline_s: float, restart: bool, tasks: asyncio.TaskGroup) -> int:
        """How much was cut off, once the worker has left or serves again. A drain under way is joined.

        Raises NotFound, or PeerLost where the worker does not serve.
        """
        if self._fleet.stage(worker_id) is Stage.SERVING:
            await self.until_over(worker_id)
        stage = self._fleet.stage(worker_id)
        if stage is Stage.DRAINED:
            if restart:
                await self._bring_back(worker_id)
            return 0
        if stage not in (Stage.SERVING, Stage.DRAINING):
            raise PeerLost(f"{worker_id} is {stage}: only a worker that serves can be drained; try again later")
        self._ground.set_departure(worker_id, Departure.BACK if restart else Departure.AWAY)
        return await asyncio.shield(self._begin(worker_id, deadline_s, tasks))

    async def switch(self, worker_id: str, deadline_s: float, tasks: asyncio.TaskGroup) -> int:
        """How much was cut off, once the worker serves in the role that it shall have, in the same process if it can.

        What it has cached stays with it. Raises NotFound, or PeerLost where the worker does not serve.
        """
        if self._fleet.stage(worker_id) is not Stage.SERVING or worker_id in self._running:
            raise PeerLost(f"{worker_id} is {self._fleet.stage(worker_id)}: only a worker that serves can switch")
        self._ground.set_departure(worker_id, Departure.SWITCH)
        return await asyncio.shield(self._begin(worker_id, deadline_s, tasks))

    def lingers(self, worker_id: str) -> bool:
        """A drain has not ended; where the worker serves, it is of the life before."""
        return worker_id in self._running

    async def until_over(self, worker_id: str) -> None:
        while worker_id in self._running:
            await asyncio.wait([self._running[worker_id]])

    def move(self, worker_id: str, deadline_s: float, tasks: asyncio.TaskGroup) -> None:
        """A worker that serves drains from now on, and its next life begins where Ray then puts it.

        Nothing happens while a drain of its life before is about to end: ask again later.
        """
        if worker_id not in self._running:
            self._ground.set_departure(worker_id, Departure.BACK)
            self._begin(worker_id, deadline_s, tasks)

    def resume(self, worker_id: str, tasks: asyncio.TaskGroup) -> None:
        """The worker serves, as far as its process says: an earlier life of the supervisor may have begun a drain."""
        departure = self._ground.departure(worker_id)
        if departure is Departure.SWITCH and not self._fleet.shall_switch(worker_id):
            self._ground.set_departure(worker_id, None)  # it has
        elif departure is not None:
            self._begin(worker_id, SWITCH_S if departure is Departure.SWITCH else DEADLINE_S, tasks)

    def ended(self, worker_id: str) -> bool:
        """A life is over, or there is none. True where none shall follow."""
        if self._ground.departure(worker_id) is Departure.AWAY:
            return True
        self._ground.set_departure(worker_id, None)
        return False

    def switches(self, worker_id: str) -> bool:
        """The next life begins in the same process."""
        return self._ground.departure(worker_id) is Departure.SWITCH

    def returns(self, worker_id: str) -> bool:
        """It drains, and a new life of the same role follows."""
        return self._ground.departure(worker_id) is Departure.BACK

    def _begin(self, worker_id: str, deadline_s: float, tasks: asyncio.TaskGroup) -> asyncio.Task[int]:
        running = self._running.get(worker_id)
        if running is None:
            self._fleet.enter(worker_id, Stage.DRAINING)
            # Now: by the time the task begins, this life may be over.
            address = self._fleet.serving(worker_id).address
            running = self._running[worker_id] = tasks.create_task(self._drain(worker_id, address, deadline_s))
            running.add_done_callback(lambda _: self._over(worker_id))
        return running

    def _over(self, worker_id: str) -> None:
        del self._running[worker_id]
        self._fleet.wake()

    async def _bring_back(self, worker_id: str) -> None:
        self._ground.set_departure(worker_id, None)
        self._fleet.enter(worker_id, Stage.ABSENT)
        await self._fleet.until(worker_id, lambda stage: stage in (Stage.SERVING, Stage.FAILED))

    async def _drain(self, worker_id: str, address: str, deadline_s: float) -> int:
        fleet = self._fleet
        log.info("drain worker=%s deadline_s=%.1f then=%s", worker_id, deadline_s, self._ground.departure(worker_id))
        reach(Point.SUPERVISOR_DRAINING)
        left = 0
        try:
            left = await self._ask(worker_id, address, deadline_s)
            if fleet.stage(worker_id) is Stage.DRAINING:  # and no life after that one
                await asyncio.wait_for(fleet.handle(worker_id).shutdown(), self._shutdown_s)
        except (ServeError, TimeoutError) as error:
            log.warning("worker does not leave by itself worker=%s error=%r", worker_id, error)
        await self._make_end(worker_id)
        await fleet.until(worker_id, lambda stage: stage in (Stage.SERVING, Stage.DRAINED, Stage.FAILED))
        log.info("drained worker=%s cut_off=%d stage=%s", worker_id, left, fleet.stage(worker_id))
        return left

    async def _make_end(self, worker_id: str) -> None:
        """Whatever the worker does; one that has died is not killed once more."""
        try:
            async with asyncio.timeout(END_S):
                await self._fleet.until(worker_id, lambda stage: stage is not Stage.DRAINING)
        except TimeoutError:
            self._fleet.handle(worker_id).recycle()
            await self._fleet.until(worker_id, lambda stage: stage is not Stage.DRAINING)

    async def _ask(self, worker_id: str, address: str, deadline_s: float) -> int:
        peer = PeerChannel(address, self._us)
        heirs = [] if self.switches(worker_id) else self._fleet.heirs(worker_id)
        request = control_pb2.DrainRequest(deadline_s=deadline_s, heirs=heirs)
        try:
            answer = await control_pb2_grpc.ControlStub(peer.channel).Drain(
                request, metadata=peer.metadata, timeout=call_timeout_s(deadline_s + ANSWER_S)
            )
        except grpc.aio.AioRpcError as error:
            raise error_of(error, address) from error
        finally:
            await peer.close()
        return answer.open_requests
