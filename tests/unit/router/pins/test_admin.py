"""The admin port's pins: tokens, hashes and salts as requests have them; the supervisor gets the rest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
import pytest

from router.fleet.named_models import NamedModel
from tests.unit.router.conftest import FACTS, Frontend, open_frontend
from twostroke.base.errors import ContextLengthExceeded, InvalidRequest, NotFound, PeerLost, PinRefused, ServeError
from twostroke.config import EndpointsConfig
from twostroke.kv_cache.block import block_hashes_of, owner_salt
from twostroke.kv_cache.pins.pin_table import pin_id_of
from twostroke.request import WeightsRef
from twostroke.rpc.channel import error_of
from twostroke.rpc.convert import hashes_from_bytes
from twostroke.rpc.pins import pin_from_message
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import inference_pb2, pins_pb2, pins_pb2_grpc

TEXT = "You are the voice of a ship, and you never tell where it is."


@dataclass
class Supervisor(pins_pb2_grpc.PinsServicer):
    """Remembers what it was asked."""

    puts: list[pins_pb2.PutPinRequest] = field(default_factory=list)
    removes: list[pins_pb2.RemovePinRequest] = field(default_factory=list)
    refusal: ServeError | None = None

    async def Put(self, request: pins_pb2.PutPinRequest, context: object) -> pins_pb2.PutPinResponse:  # noqa: N802
        if self.refusal is not None:
            raise self.refusal
        self.puts.append(request)
        return pins_pb2.PutPinResponse(held=[pins_pb2.HeldPin(worker_id="decode-0", pin_id=request.pin.pin_id)])

    async def Remove(self, request: pins_pb2.RemovePinRequest, context: object) -> pins_pb2.RemovePinResponse:  # noqa: N802
        self.removes.append(request)
        return pins_pb2.RemovePinResponse(removed=1)

    async def List(self, request: pins_pb2.ListPinsRequest, context: object) -> pins_pb2.ListPinsResponse:  # noqa: N802
        return pins_pb2.ListPinsResponse(held=[pins_pb2.HeldPin(worker_id="decode-0")])


@asynccontextmanager
async def router() -> AsyncIterator[tuple[Frontend, Supervisor]]:
    supervisor, server = Supervisor(), RpcServer("127.0.0.1", 0, token=None)
    pins_pb2_grpc.add_PinsServicer_to_server(supervisor, server.server)
    await server.start()
    try:
        async with open_frontend(EndpointsConfig(), server.address) as frontend:
            yield frontend, supervisor
    finally:
        await server.stop(0)


async def call(frontend: Frontend, method: str, request):
    try:
        return await getattr(pins_pb2_grpc.PinAdminStub(frontend.admin), method)(request, timeout=60)
    except grpc.aio.AioRpcError as error:
        raise error_of(error, "the router") from error


async def test_a_pin_has_the_hashes_that_requests_of_its_tenant_have() -> None:
    async with router() as (frontend, supervisor):
        for tenant, salt in (("", ""), ("acme", ""), ("acme", "s")):
            request = pins_pb2.AddPinRequest(text=TEXT, owner="ops", tenant=tenant, cache_salt=salt, ttl_s=60)
            added = await call(frontend, "Add", request)
            pin = supervisor.puts[-1].pin
            hashes = block_hashes_of(list(TEXT.encode()), FACTS.block_size, owner_salt(tenant, salt.encode()))
            assert hashes_from_bytes(pin.block_hashes) == hashes
            assert bytes(pin.tokens) == TEXT.encode()[: 16 * len(hashes)]
            assert added.pin_id == pin.pin_id == pin_id_of("ops", tenant, hashes[-1])
            assert (added.tokens, added.pinned_tokens, added.public_tokens) == (len(TEXT), 16 * len(hashes), 0)
            assert pin.HasField("expires_s")
            await frontend.http.post(
                "/v1/completions",
                json={"prompt": TEXT + "Where?", "cache_salt": salt or None},
                headers={"X-Tenant-Id": tenant},
            )
            sent = frontend.dispatcher.requests[-1]
            assert block_hashes_of(sent.prompt, FACTS.block_size, sent.salt)[: len(hashes)] == hashes


async def test_a_pin_of_an_adapter_has_the_hashes_that_its_requests_have_and_says_who_computes_it() -> None:
    async with router() as (frontend, supervisor):
        ref = WeightsRef(b"a" * 16, "/loras/legal")
        frontend.dispatcher.named_models = {"legal": NamedModel("legal", ref, 4, 100, 0.0)}
        await call(frontend, "Add", pins_pb2.AddPinRequest(text=TEXT, owner="ops", model="legal"))
        pin = pin_from_message(supervisor.puts[-1].pin)
        assert pin.weights == ref
        await frontend.http.post("/v1/completions", json={"prompt": TEXT + "Where?", "model": "legal"})
        sent = frontend.dispatcher.requests[-1]
        assert (
            tuple(block_hashes_of(sent.prompt, FACTS.block_size, sent.salt))[: len(pin.block_hashes)]
            == pin.block_hashes
        )
        with pytest.raises(NotFound, match="'civil' does not exist"):
            await call(frontend, "Add", pins_pb2.AddPinRequest(text=TEXT, owner="ops", model="civil"))


async def test_a_chat_is_pinned_up_to_where_chats_that_begin_like_it_differ() -> None:
    async with router() as (frontend, supervisor):
        chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="system", content=TEXT)])
        await call(frontend, "Add", pins_pb2.AddPinRequest(chat=chat, owner="ops"))
        pinned = bytes(supervisor.puts[-1].pin.tokens)
        messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Where are we?"}]
        await frontend.http.post("/v1/chat/completions", json={"messages": messages})
        prompt = bytes(frontend.dispatcher.requests[-1].prompt)
        common = f"system: {TEXT}\nuser: ".encode()
        assert prompt.startswith(common)
        assert pinned == common[: len(common) // 16 * 16]


async def test_where_it_lies_how_long_and_how_large_it_may_be_is_passed_on() -> None:
    async with router() as (frontend, supervisor):
        request = pins_pb2.AddPinRequest(token_ids=inference_pb2.TokenIds(ids=[5] * 32), owner="ops", max_bytes=9000)
        request.workers.extend(["decode-0", "prefill"])
        await call(frontend, "Add", request)
        put = supervisor.puts[-1]
        assert put.pin.fingerprint == FACTS.fingerprint
        assert (list(put.pin.workers), put.pin.max_bytes, put.pin.HasField("expires_s")) == (
            ["decode-0", "prefill"],
            9000,
            False,
        )
        assert (await call(frontend, "Remove", pins_pb2.RemovePinRequest(pin_id="0a"))).removed == 1
        assert supervisor.removes[-1].pin_id == "0a"
        assert (await call(frontend, "List", pins_pb2.ListPinsRequest())).held[0].worker_id == "decode-0"


async def test_what_cannot_be_pinned_is_refused_naming_the_field() -> None:
    text = {"text": TEXT, "owner": "ops"}
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="wizard", content=TEXT)])
    async with router() as (frontend, supervisor):
        for field_name, fields in (
            ("owner", {**text, "owner": ""}),
            ("owner", {**text, "owner": "a\nb"}),
            ("owner", {**text, "owner": "a" * 300}),
            ("tenant", {**text, "tenant": "\0"}),
            ("cache_salt", {**text, "cache_salt": "s" * 2000}),
            ("ttl_s", {**text, "ttl_s": 0.0}),
            ("ttl_s", {**text, "ttl_s": -1.0}),
            ("ttl_s", {**text, "ttl_s": float("nan")}),
            ("ttl_s", {**text, "ttl_s": 1e12}),
            ("per_role", {**text, "per_role": 5000}),
            ("workers", {**text, "workers": ["decode-0"] * 300}),
            ("prefix", {"owner": "ops"}),
            ("prefix", {"owner": "ops", "text": "too short"}),
            ("prompt", {"owner": "ops", "text": ""}),
            ("prompt", {"owner": "ops", "token_ids": inference_pb2.TokenIds(ids=[9999] * 32)}),
            ("messages", {"owner": "ops", "chat": inference_pb2.Chat()}),
            ("messages[0].role", {"owner": "ops", "chat": chat}),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await call(frontend, "Add", pins_pb2.AddPinRequest(**fields))
            assert refused.value.field == field_name, fields
        with pytest.raises(ContextLengthExceeded):
            await call(frontend, "Add", pins_pb2.AddPinRequest(text="x" * 4000, owner="ops"))
        assert supervisor.puts == []


async def test_a_refusal_comes_with_its_numbers_and_an_absent_supervisor_is_said() -> None:
    async with router() as (frontend, supervisor):
        supervisor.refusal = PinRefused("decode-0: 3 of 4 pages", field="pin_cap")
        with pytest.raises(PinRefused, match="3 of 4 pages") as refused:
            await call(frontend, "Add", pins_pb2.AddPinRequest(text=TEXT, owner="ops"))
        assert refused.value.field == "pin_cap"
    async with open_frontend(EndpointsConfig(), "127.0.0.1:1") as frontend:
        with pytest.raises(PeerLost, match=r"127\.0\.0\.1:1"):
            await call(frontend, "List", pins_pb2.ListPinsRequest())
