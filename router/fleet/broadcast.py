"""Calls that go to every worker at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from router.fleet.worker import Worker
from twostroke.base.ids import WorkerId
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import control_pb2
from twostroke.rpc.v1.control_pb2_grpc import ControlStub

CALL_TIMEOUT_S = 5.0
"""Deadline of each call; none of them computes anything."""


async def forget_cached(workers: Sequence[Worker], membership: Membership) -> control_pb2.ForgetCachedResponse:
    """Returns the sums of all workers. Raises the first worker's error; the others have forgotten then."""
    request = control_pb2.ForgetCachedRequest()
    results = await _call_all(workers, membership, lambda stub: stub.ForgetCached, request)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return control_pb2.ForgetCachedResponse(
        blocks=sum(result.blocks for result in results), pinned=sum(result.pinned for result in results)
    )


async def traces_at(
    workers: Sequence[Worker], membership: Membership, name: str
) -> tuple[list[control_pb2.GetTraceResponse], list[WorkerId]]:
    """Returns what each worker knows of a request or stream, and the workers that did not answer."""
    results = await _call_all(workers, membership, lambda stub: stub.GetTrace, control_pb2.GetTraceRequest(name=name))
    known = [result for result in results if isinstance(result, control_pb2.GetTraceResponse)]
    silent = [w.worker_id for w, result in zip(workers, results, strict=True) if isinstance(result, BaseException)]
    return known, silent


async def _call_all(
    workers: Sequence[Worker], membership: Membership, method: Callable[[ControlStub], Any], request: Any
) -> list[Any]:
    """Returns each worker's response, or what it raised."""

    async def call(worker: Worker) -> Any:
        channel = PeerChannel(worker.address, membership)
        try:
            return await channel.call(method(ControlStub(channel.channel)), request, CALL_TIMEOUT_S)
        finally:
            await channel.close()

    return await asyncio.gather(*map(call, workers), return_exceptions=True)
