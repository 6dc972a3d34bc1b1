"""What a router reports to the autoscaler: each ended request once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from router.fleet import demand
from router.fleet.demand import MOST_ENDED, DemandReporter
from router.fleet.fleet import Fleet
from twostroke.base.errors import PeerLost
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import fleet_pb2


class FakeFleet:
    @property
    def facts(self) -> Any:
        raise PeerLost("no worker is known")

    def loads(self) -> list[Any]:
        return []


@pytest.mark.parametrize("fails", [False, True])
async def test_requests_that_end_while_a_report_is_sent_are_in_the_next(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = DemandReporter("r", cast(Fleet, FakeFleet()))
    reports: list[list[int]] = []
    both = asyncio.Event()

    class Channel:
        channel = None

        def __init__(self, *_: Any) -> None:
            pass

        async def call(self, _: Any, report: fleet_pb2.ReportRequest, timeout_s: float) -> None:
            reports.append([each.output_tokens for each in report.ended])
            if len(reports) == 2:
                both.set()
                await asyncio.Event().wait()
            for number in range(MOST_ENDED):
                reporter.ends(1, 0, 100 + number)
            if fails:
                raise PeerLost("the supervisor is gone")

        async def close(self) -> None:
            pass

    monkeypatch.setattr(demand, "PeerChannel", Channel)
    monkeypatch.setattr(demand, "REPORT_S", 0.001)
    monkeypatch.setattr(demand.fleet_pb2_grpc, "FleetStub", lambda _: type("Stub", (), {"Report": None}))
    reporter.ends(1, 0, 7)
    running = asyncio.create_task(reporter.run("", cast(Membership, None)))
    await asyncio.wait_for(both.wait(), 60)
    running.cancel()
    assert reports == [[7], [100 + number for number in range(MOST_ENDED)]]
