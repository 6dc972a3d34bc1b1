"""The calls with which operators add and remove pins. A router tokenizes the prefix; the supervisor keeps the pin."""

# ruff: noqa: N802  # methods have the names that the .proto gives them

from __future__ import annotations

import math
import time
from typing import Any

import grpc.aio

from router.requests.params import check_request_id, check_salt
from router.requests.request_handler import RequestHandler
from router.server_branch import RouterBranch, RouterParts, SupervisorCalls
from twostroke.base.errors import InvalidRequest
from twostroke.base.fault_points import Point, reach
from twostroke.kv_cache.block import block_hashes_of, owner_salt
from twostroke.kv_cache.pins.pin_table import Pin, pin_id_of
from twostroke.rpc.pins import pin_to_message
from twostroke.rpc.server import RpcServer
from twostroke.rpc.v1 import pins_pb2, pins_pb2_grpc
from twostroke.rpc.v1.pins_pb2_grpc import PinsStub

Context = grpc.aio.ServicerContext[Any, Any]

SUPERVISOR_S = 15.0
"""Deadline of calls to the supervisor, in seconds. It calls workers, and waits for those that do not answer."""
LONGEST_TTL_S = 3650 * 86_400.0
"""Longest lifetime of a pin: ten years. A longer one is a mistake."""
MOST_PER_ROLE = 1024
"""Most workers of each role that a pin may request."""
MOST_NAMES = 256
"""Most workers that one pin may name."""


class PinAdmin(pins_pb2_grpc.PinAdminServicer):
    """Calls of operators for pins. The console makes them without a gRPC context."""

    def __init__(self, handler: RequestHandler, supervisor: SupervisorCalls) -> None:
        self._handler = handler
        self._supervisor = supervisor

    async def Add(self, request: pins_pb2.AddPinRequest, context: Context | None = None) -> pins_pb2.AddPinResponse:
        _check(request)
        facts = self._handler.dispatcher.facts
        named_model = self._handler.named(request.model)
        tokens, public_tokens = await self._handler.shared_prefix(request.SerializeToString())
        blocks = len(tokens) // facts.block_size
        if not blocks:
            raise InvalidRequest(
                f"the prefix has {len(tokens)} tokens, and only whole blocks of {facts.block_size} are pinned: "
                f"it must have at least {facts.block_size} tokens",
                field="prefix",
            )
        pinned = tuple(tokens[: blocks * facts.block_size])
        salt = owner_salt(request.tenant, check_salt(request.cache_salt) if request.cache_salt else b"")
        if named_model is not None:
            salt, public_tokens = named_model.salted(salt), 0
        hashes = block_hashes_of(pinned, facts.block_size, salt, public_tokens // facts.block_size)
        pin = Pin(
            pin_id=pin_id_of(request.owner, request.tenant, hashes[-1]),
            owner=request.owner,
            tenant=request.tenant,
            tokens=pinned,
            block_hashes=tuple(hashes),
            expires_s=time.time() + request.ttl_s if request.HasField("ttl_s") else None,
            max_bytes=request.max_bytes,
            text=self._handler.text.decode(pinned[:64], skip_special_tokens=True),
            weights=None if named_model is None else named_model.ref,
        )
        message = pin_to_message(pin, facts.fingerprint, tuple(request.workers))
        put = pins_pb2.PutPinRequest(pin=message, per_role=request.per_role)
        reach(Point.ROUTER_PINNING)
        reply: pins_pb2.PutPinResponse = await self._supervisor.ask(PinsStub, "Put", put, SUPERVISOR_S)
        return pins_pb2.AddPinResponse(
            pin_id=pin.pin_id,
            tokens=len(tokens),
            pinned_tokens=len(pinned),
            public_tokens=min(public_tokens, len(pinned)),
            held=reply.held,
        )

    async def Remove(
        self, request: pins_pb2.RemovePinRequest, context: Context | None = None
    ) -> pins_pb2.RemovePinResponse:
        reply: pins_pb2.RemovePinResponse = await self._supervisor.ask(PinsStub, "Remove", request, SUPERVISOR_S)
        return reply

    async def List(
        self, request: pins_pb2.ListPinsRequest, context: Context | None = None
    ) -> pins_pb2.ListPinsResponse:
        reply: pins_pb2.ListPinsResponse = await self._supervisor.ask(PinsStub, "List", request, SUPERVISOR_S)
        return reply


def _check(request: pins_pb2.AddPinRequest) -> None:
    """Raises InvalidRequest that names a wrong field."""
    if not request.owner:
        raise InvalidRequest("a pin needs an owner", field="owner")
    check_request_id(request.owner, "owner")
    check_request_id(request.tenant, "tenant")
    if request.HasField("ttl_s") and not (math.isfinite(request.ttl_s) and 0 < request.ttl_s <= LONGEST_TTL_S):
        raise InvalidRequest(
            f"ttl_s must be seconds, more than 0 and at most {LONGEST_TTL_S:.0f}, got {request.ttl_s:g}", field="ttl_s"
        )
    if request.per_role > MOST_PER_ROLE:
        raise InvalidRequest(f"per_role must be at most {MOST_PER_ROLE}, got {request.per_role}", field="per_role")
    if len(request.workers) > MOST_NAMES:
        raise InvalidRequest(f"at most {MOST_NAMES} workers can be named, got {len(request.workers)}", field="workers")


class RouterPins(RouterBranch):
    def __init__(self, parts: RouterParts) -> None:
        self._admin = PinAdmin(parts.handler, parts.supervisor)

    def administer(self, rpc: RpcServer) -> None:
        pins_pb2_grpc.add_PinAdminServicer_to_server(self._admin, rpc.server)
        rpc.offer("twostroke.v1.PinAdmin", waits_for_ready=False, is_described=True)
