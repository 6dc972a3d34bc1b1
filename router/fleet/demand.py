"""What this router is asked for, told to the supervisor every second: the planner counts workers by it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

import grpc.aio

from router.fleet.fleet import Fleet
from twostroke.config import RouterConfig
from twostroke.errors import PeerLost
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import control_pb2, fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

REPORT_S = 1.0
ANSWER_S = 2.0
MOST_ENDED = 64
"""Answers told of in one report: the latest. A planner needs their spread, not each of them."""


class Demand:
    """Counted by answers as they come and go."""

    def __init__(self) -> None:
        self.arrived = 0
        self.ended: deque[fleet_pb2.EndedAnswer] = deque(maxlen=MOST_ENDED)

    def begins(self) -> None:
        self.arrived += 1

    def ends(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """As its client wanted it; one that was cancelled or refused says nothing of what such answers take."""
        cached_tokens = min(cached_tokens, prompt_tokens)
        self.ended.append(
            fleet_pb2.EndedAnswer(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, output_tokens=output_tokens)
        )


class DemandReports:
    def __init__(self, config: RouterConfig, us: Membership, router_id: str, demand: Demand, fleet: Fleet) -> None:
        self._config = config
        self._us = us
        self._router_id = router_id
        self._demand = demand
        self._fleet = fleet
        self._is_heard = True

    async def run(self) -> None:
        """Until cancelled. A supervisor that does not answer is told the next time."""
        channel = PeerChannel(self._config.fleet_address, self._us)
        stub = fleet_pb2_grpc.FleetStub(channel.channel)
        try:
            while True:
                await asyncio.sleep(REPORT_S)
                report = self._report()
                try:
                    await stub.Report(report, metadata=channel.metadata, timeout=ANSWER_S)
                except grpc.aio.AioRpcError as error:
                    if self._is_heard:
                        log.warning("demand not reported error=%s", error_of(error, channel.address))
                    self._is_heard = False
                    continue
                self._is_heard = True
                for _ in range(min(len(report.ended), len(self._demand.ended))):  # those that came meanwhile stay
                    self._demand.ended.popleft()
        finally:
            await channel.close()

    def _report(self) -> fleet_pb2.ReportRequest:
        try:
            block_size = self._fleet.facts.block_size
        except PeerLost:
            block_size = 0
        return fleet_pb2.ReportRequest(
            router_id=self._router_id,
            arrived=self._demand.arrived,
            ended=self._demand.ended,
            workers=[
                control_pb2.WorkerLoad(worker_id=member.worker, load=member.load, server=member.server)
                for member in self._fleet.members
                if member.server is not None
            ],
            block_size=block_size,
        )
