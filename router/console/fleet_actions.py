"""What operators do to workers, by the supervisor's calls: it drains them and switches their roles."""

from __future__ import annotations

import math
from typing import Any

from router.server_branch import SupervisorCalls
from twostroke.base.errors import InvalidRequest
from twostroke.rpc.v1 import fleet_pb2
from twostroke.rpc.v1.fleet_pb2_grpc import FleetStub

LONGEST_DRAIN_S = 3600.0
ANSWER_S = 120.0
"""Seconds beyond the deadline for a drain, or for a switch of roles: what is open is handed over, and a worker that
restarts loads its model."""

DRAIN_FIELDS: dict[str, type] = {"worker": str, "deadline_s": float, "restart": bool, "force": bool}
ROLE_FIELDS: dict[str, type] = {"worker": str, "role": str}


class FleetActions:
    def __init__(self, supervisor: SupervisorCalls) -> None:
        self._supervisor = supervisor

    async def drain(self, fields: dict[str, Any]) -> str:
        """Returns what happened in words, once the worker has left or serves again.

        Raises what the supervisor raises.
        """
        worker, deadline_s = _named(fields), fields["deadline_s"]
        if not (math.isfinite(deadline_s) and 0 <= deadline_s <= LONGEST_DRAIN_S):
            raise InvalidRequest(f"deadline_s must be from 0 to {LONGEST_DRAIN_S:.0f} seconds", field="deadline_s")
        request = fleet_pb2.DrainWorkerRequest(
            worker_id=worker, deadline_s=deadline_s, restart=fields["restart"], force=fields["force"]
        )
        left = (await self._supervisor.ask(FleetStub, "DrainWorker", request, deadline_s + ANSWER_S)).open_requests
        cut = f"; {left} requests were cut off and go on elsewhere" if left else ""
        return f"{worker} {'serves again' if fields['restart'] else 'has left'}{cut}"

    async def assign_role(self, fields: dict[str, Any]) -> str:
        worker, role = _named(fields), fields["role"]
        await self._supervisor.ask(
            FleetStub, "AssignRole", fleet_pb2.AssignRoleRequest(worker_id=worker, role=role), ANSWER_S
        )
        return f"{worker} serves as a {role} worker; counts stay as they are until: twostroke scale --auto"


def _named(fields: dict[str, Any]) -> str:
    if not fields["worker"]:
        raise InvalidRequest("a worker must be named", field="worker")
    return str(fields["worker"])
