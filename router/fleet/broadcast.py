"""What is asked of every worker at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio

from router.fleet.worker import Member
from twostroke.ids import WorkerId
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import control_pb2
from twostroke.rpc.v1.control_pb2_grpc import ControlStub

CALL_TIMEOUT_S = 5.0
"""Nothing that is asked here computes."""


async def forget_cached(members: Sequence[Member], us: Membership) -> int:
    """Blocks that were forgotten. Raises what the first worker raised that could not; the others have forgotten."""
    results = await asyncio.gather(*(_forget_at(member, us) for member in members), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return sum(result for result in results if isinstance(result, int))


async def traces_at(
    members: Sequence[Member], us: Membership, name: str
) -> tuple[list[control_pb2.GetTraceResponse], list[WorkerId]]:
    """What each says of a request or stream, and who says nothing."""
    results = await asyncio.gather(*(_trace_at(member, us, name) for member in members), return_exceptions=True)
    said = [result for result in results if isinstance(result, control_pb2.GetTraceResponse)]
    silent = [m.worker for m, result in zip(members, results, strict=True) if isinstance(result, BaseException)]
    return said, silent


async def _trace_at(member: Member, us: Membership, name: str) -> control_pb2.GetTraceResponse:
    channel = PeerChannel(member.address, us)
    try:
        return await ControlStub(channel.channel).GetTrace(
            control_pb2.GetTraceRequest(name=name), metadata=channel.metadata, timeout=CALL_TIMEOUT_S
        )
    finally:
        await channel.close()


async def _forget_at(member: Member, us: Membership) -> int:
    channel = PeerChannel(member.address, us)
    try:
        answer = await ControlStub(channel.channel).ForgetCached(
            control_pb2.ForgetCachedRequest(), metadata=channel.metadata, timeout=CALL_TIMEOUT_S
        )
        return int(answer.blocks)
    except grpc.aio.AioRpcError as error:
        raise error_of(error, channel.address) from None
    finally:
        await channel.close()
