"""twostroke.v1.Faults: arms faults in the process that serves it. Only where TWOSTROKE_FAULT was set."""

from __future__ import annotations

import logging
from typing import Any

import grpc.aio

from twostroke.errors import ConfigError
from twostroke.faults.injector import Injector
from twostroke.faults.plan import Fault, Guard
from twostroke.rpc.v1 import faults_pb2, faults_pb2_grpc

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class FaultsService(faults_pb2_grpc.FaultsServicer):
    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    async def Arm(  # noqa: N802
        self, request: faults_pb2.ArmRequest, context: Context
    ) -> faults_pb2.ArmResponse:
        del context
        fault = Fault.parse(request.fault)
        self._injector.arm(fault)
        log.warning("fault armed fault=%s", fault)
        return faults_pb2.ArmResponse()

    async def SwitchOff(  # noqa: N802
        self, request: faults_pb2.SwitchOffRequest, context: Context
    ) -> faults_pb2.SwitchOffResponse:
        del context
        if request.guard and request.guard not in list(Guard):
            raise ConfigError(f"there is no guard {request.guard!r}; there are {', '.join(Guard)}", field="guard")
        self._injector.off = Guard(request.guard) if request.guard else None
        log.warning("guard off guard=%s", request.guard or "none")
        return faults_pb2.SwitchOffResponse()

    async def Heal(  # noqa: N802
        self, request: faults_pb2.HealRequest, context: Context
    ) -> faults_pb2.HealResponse:
        del context
        self._injector.heal()
        return faults_pb2.HealResponse(reached=self._injector.reached)


def serve_faults(injector: Injector | None, server: grpc.aio.Server) -> None:
    """Let faults be armed by rpc where there is an injector; without one, nothing is served. `server` must ask for the
    cluster's token."""
    if injector is None:
        return
    faults_pb2_grpc.add_FaultsServicer_to_server(FaultsService(injector), server)
    log.warning(
        "THIS PROCESS CAN BE BROKEN ON PURPOSE: TWOSTROKE_FAULT is set. Never do that to a cluster that serves people. "
        "process=%s",
        injector.process,
    )
