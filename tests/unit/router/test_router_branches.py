"""A router with an empty table of branches: it answers clients, and has nothing of a branch."""

from __future__ import annotations

import grpc.aio
import pytest

from router.branches import BRANCHES
from router.server_branch import RouterTable
from tests.unit.router.conftest import open_frontend
from twostroke.config import EndpointsConfig
from twostroke.rpc.v1 import adapters_pb2, adapters_pb2_grpc, pins_pb2, pins_pb2_grpc


async def served(branches: RouterTable) -> tuple[bool, bool, bool]:
    """Whether a router that answers clients has the console, pins and adapters."""
    async with open_frontend(EndpointsConfig(), branches=branches) as frontend:
        answer = await frontend.openai.completions.create(model="toy", prompt="hi", max_tokens=3)
        assert answer.choices[0].text
        page = await frontend.http.get("/console/")
        calls = [
            pins_pb2_grpc.PinAdminStub(frontend.admin).Add(pins_pb2.AddPinRequest()),
            adapters_pb2_grpc.AdapterAdminStub(frontend.admin).Load(adapters_pb2.LoadAdapterRequest()),
        ]
        codes = []
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            codes.append(refused.value.code())
        pins, adapters = (code is not grpc.StatusCode.UNIMPLEMENTED for code in codes)
        return page.status_code != 404, pins, adapters


async def test_a_router_with_an_empty_table_answers_clients_and_has_no_branch() -> None:
    assert await served(()) == (False, False, False)
    assert await served(BRANCHES) == (True, True, True)
