"""Pins as a branch of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from twostroke.kv_cache.groups.page_state import PageState
from twostroke.request import Attempt
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import control_pb2, pins_pb2_grpc
from twostroke.worker.branches import Branch, BranchHost
from twostroke.worker.pins.handlers import HandlersWithPins
from twostroke.worker.pins.keeper import PinKeeper
from twostroke.worker.pins.service import PinsService
from twostroke.worker.role_host import RoleHandlers


class Pins(Branch):
    keeper: PinKeeper
    """Begins with `serve`, because its pulls are tasks of the worker."""

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
