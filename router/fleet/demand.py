"""Reports every second to the supervisor what clients request of this router, for the autoscaler."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from router.fleet.fleet import Fleet
from twostroke.base.errors import PeerLost, ServeError
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

REPORT_S = 1.0
"""Seconds between two reports."""
CALL_TIMEOUT_S = 2.0
MOST_ENDED = 64
"""Most ended requests in one report: the latest ones. The autoscaler needs their spread, not each of them."""


class DemandReporter:
    """Counts requests that arrive and end, and reports them."""

    def __init__(self, router_id: str, fleet: Fleet) -> None:
        self.arrived = 0
        self.ended: deque[fleet_pb2.EndedAnswer] = deque(maxlen=MOST_ENDED)
        self._router_id = router_id
        self._fleet = fleet

    def begins(self) -> None:
        self.arrived += 1

    def ends(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Counts a request that ended well. Leave out cancelled and refused ones: their lengths are not typical."""
        cached_tokens = min(cached_tokens, prompt_tokens)
        self.ended.append(
            fleet_pb2.EndedAnswer(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, output_tokens=output_tokens)
        )

    async def run(self, fleet_address: str, membership: Membership) -> None:
        """Reports until it is cancelled. What did not reach the supervisor is part of the next report."""
        channel = PeerChannel(fleet_address, membership)
        stub = fleet_pb2_grpc.FleetStub(channel.channel)
        is_heard = True
        try:
            while True:
                await asyncio.sleep(REPORT_S)
                report, reported = self._report(), self.ended
                self.ended = deque(maxlen=MOST_ENDED)
                try:
                    await channel.call(stub.Report, report, CALL_TIMEOUT_S)
                except ServeError as error:
                    if is_heard:
                        log.warning("demand not reported error=%s", error)
                    is_heard = False
                    self.ended = deque([*reported, *self.ended], MOST_ENDED)
                    continue
                is_heard = True
        finally:
            await channel.close()

    def _report(self) -> fleet_pb2.ReportRequest:
        try:
            block_size = self._fleet.facts.block_size
        except PeerLost:
            block_size = 0
        return fleet_pb2.ReportRequest(
            router_id=self._router_id,
            arrived=self.arrived,
            ended=self.ended,
            workers=[load for load in self._fleet.loads() if load.HasField("server")],
            block_size=block_size,
        )
