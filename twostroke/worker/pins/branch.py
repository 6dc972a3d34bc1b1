"""Pins as a branch of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from twostroke.base.errors import EngineLost
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.request import Attempt
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import control_pb2, pins_pb2_grpc
from twostroke.scheduler.batching import Step
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import AdmittedSequence, Emission
from twostroke.worker.branches import Branch, BranchHost
from twostroke.worker.pins.keeper import PinKeeper
from twostroke.worker.pins.service import PinsService
from twostroke.worker.role_host import RoleHandlers


class Pins(Branch):
    keeper: PinKeeper
    """The keeper of the epoch's pins. `serve` makes it, because its pulls are tasks of the worker."""

    def __init__(self, host: BranchHost) -> None:
        super().__init__(host)
        host.pool.unpin_all()  # the supervisor gives an epoch its pins

    def serve(self, rpc: RpcServer, tasks: asyncio.TaskGroup) -> None:
        self.keeper = PinKeeper(self.host, tasks)
        pins_pb2_grpc.add_PinsServicer_to_server(PinsService(self.host, self.keeper), rpc.server)
        rpc.offer("twostroke.v1.Pins")

    def handlers(self, role: RoleHandlers) -> RoleHandlers:
        return HandlersWithPins(role, self.keeper)

    def opened(self, attempt: Attempt) -> None:
        self.keeper.hint(attempt)

    def watching(self, handlers: RoleHandlers) -> Iterable[Callable[[], Awaitable[object]]]:
        return (self.keeper.watch,)

    def draining(self) -> None:
        self.keeper.stop_building()

    def add_to_load(self, load: control_pb2.Load) -> None:
        load.pages_pinned = self.host.pool.count(PageState.PINNED)


class HandlersWithPins(RoleHandlers):
    def __init__(self, role: RoleHandlers, pins: PinKeeper) -> None:
        self._role = role
        self._pins = pins

    def admitted(self, admission: AdmittedSequence) -> None:
        if admission.sequence in self._pins.building:
            self._pins.began(admission)
        else:
            if self._pins.table.by_id:
                self._pins.found(admission.sequence)
            self._role.admitted(admission)

    def planning(self) -> None:
        if self._pins.building:
            self._pins.end_finished()
        self._role.planning()

    def preempted(self, sequence: Sequence) -> None:
        if sequence not in self._pins.building:  # a pin's sequence waits again, and that is all
            self._role.preempted(sequence)

    def computed(self, step: Step, seconds: float) -> None:
        self._role.computed(step, seconds)

    def emitted(self, emissions: list[Emission]) -> None:
        self._role.emitted(emissions)

    def failed(self, sequences: list[Sequence], error: Exception) -> None:
        self._role.failed([sequence for sequence in sequences if sequence not in self._pins.building], error)
        for sequence in [each for each in sequences if each in self._pins.building]:
            self._pins.failed(sequence, error)

    def lost(self, error: EngineLost) -> None:
        self._role.lost(error)
