"""What the console does: blocks are looked up, workers drained and switched, pins added and removed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cluster.supervisor.fleet_service import FleetService
from tests.unit.router.conftest import FACTS, Frontend
from tests.unit.router.console.helpers import OPERATOR, TOKEN, console, read
from tests.unit.router.pins.test_admin import Supervisor as Pins
from twostroke.base.errors import InvalidRequest
from twostroke.base.ids import WorkerId
from twostroke.kv_cache.block import block_hashes_of, owner_salt
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import fleet_pb2_grpc, pins_pb2_grpc

XSS = "<img src=x onerror=alert(1)>"


class Workers:
    def __init__(self) -> None:
        self.drained: list[tuple[str, float, bool, bool]] = []
        self.roles: list[tuple[str, str]] = []

    async def drain(self, worker: str, deadline_s: float, restart: bool, force: bool) -> int:
        if worker == "decode-9":
            raise InvalidRequest("decode-9 is the last decode worker")
        self.drained.append((worker, deadline_s, restart, force))
        return 2

    async def assign(self, worker: str, role: str) -> None:
        self.roles.append((worker, role))


@asynccontextmanager
async def supervised() -> AsyncIterator[tuple[Frontend, Workers, Pins]]:
    workers, pins, server = Workers(), Pins(), RpcServer("127.0.0.1", 0, token=TOKEN)
    service = FleetService(workers.drain, assign_role=workers.assign)
    fleet_pb2_grpc.add_FleetServicer_to_server(service, server.server)
    pins_pb2_grpc.add_PinsServicer_to_server(pins, server.server)
    await server.start()
    try:
        async with console(server.address) as frontend:
            yield frontend, workers, pins
    finally:
        await server.stop(0)


async def act(frontend: Frontend, name: str, body: dict[str, Any]) -> tuple[int, Any]:
    answer = await frontend.http.post(f"/console/api/{name}", json=body, headers=OPERATOR)
    return answer.status_code, answer.json()


async def test_a_worker_is_drained_by_the_supervisor_as_the_command_would() -> None:
    async with supervised() as (frontend, workers, _):
        status, said = await act(frontend, "drain", {"worker": "decode-0", "deadline_s": 5, "restart": True})
        assert (status, workers.drained) == (200, [("decode-0", 5.0, True, False)])
        assert said == {"done": "decode-0 serves again; 2 requests were cut off and continue elsewhere"}
        status, said = await act(frontend, "drain", {"worker": "decode-9", "deadline_s": 5})
        assert (status, said["error"]["message"]) == (400, "decode-9 is the last decode worker")
        assert (await act(frontend, "drain", {"worker": "decode-0", "deadline_s": 1e9}))[0] == 400


async def test_a_role_is_switched_by_the_supervisor() -> None:
    async with supervised() as (frontend, workers, _):
        assert (await act(frontend, "role", {"worker": "decode-0", "role": "prefill"}))[0] == 200
        assert workers.roles == [("decode-0", "prefill")]
        status, said = await act(frontend, "role", {"worker": "decode-0", "role": XSS})
        assert (status, "role must be" in said["error"]["message"]) == (400, True)


async def test_pins_are_added_listed_and_removed() -> None:
    async with supervised() as (frontend, _, pins):
        text = "You are the voice of a ship, and you never tell where it is."
        status, said = await act(frontend, "pins/add", {"text": text, "owner": "ops", "tenant": "acme", "ttl_s": 60})
        assert status == 200, said
        assert (pins.puts[0].pin.owner, pins.puts[0].pin.tenant) == ("ops", "acme")
        assert [pin["held"][0]["worker"] for pin in (await read(frontend, "pins"))["pins"]] == ["decode-0"]
        status, said = await act(frontend, "pins/remove", {"pin": "p1"})
        assert (status, pins.removes[0].pin_id) == (200, "p1")
        for body in ({"owner": "ops"}, {"text": "a", "system": "b", "owner": "ops"}):
            assert (await act(frontend, "pins/add", body))[0] == 400


async def test_without_a_supervisor_it_is_said_who_does_not_answer() -> None:
    async with console("127.0.0.1:1") as frontend:
        status, said = await act(frontend, "role", {"worker": "decode-0", "role": "prefill"})
        assert (status, "127.0.0.1:1" in said["error"]["message"]) == (503, True)


async def test_a_prompts_blocks_are_those_that_requests_of_its_tenant_have() -> None:
    text = XSS * 3
    async with console() as frontend:
        frontend.dispatcher.held = {WorkerId("decode-0"): (2,), WorkerId("prefill-0"): (1, 1, 4)}
        status, said = await act(frontend, "blocks", {"prompt": text, "tenant": "acme"})
        assert status == 200, said
        hashes = block_hashes_of(list(text.encode()), FACTS.block_size, owner_salt("acme", b""))
        assert [block["hash"] for block in said["blocks"]] == [each.hex()[:16] for each in hashes]
        assert "".join(block["text"] for block in said["blocks"]) + said["rest_text"] == text
        assert said["holders"][0] == {"worker": "prefill-0", "down_to": {"device": 1, "host": 1, "disk": 4}}
        other = (await act(frontend, "blocks", {"prompt": text}))[1]
        assert other["blocks"][0]["hash"] != said["blocks"][0]["hash"]


async def test_a_chats_blocks_are_found_and_nonsense_is_refused() -> None:
    async with console() as frontend:
        status, said = await act(frontend, "blocks", {"messages": [{"role": "user", "content": "hello there, you"}]})
        assert (status, said["block_count"] > 0) == (200, True)
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        body = {"messages": [{"role": "user", "content": "hello there, you"}], "tools": [tool]}
        assert (await act(frontend, "blocks", body))[0] == 200
        both, nobody = {"prompt": "a", "messages": [{}]}, {"messages": [{"role": "nobody"}]}
        for body in ({}, both, nobody, {"prompt": "a", "model": "b"}):
            assert (await act(frontend, "blocks", body))[0] in (400, 404)
