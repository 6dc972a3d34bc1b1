"""The Pins service of a worker: it validates calls and answers for its own pool."""

from __future__ import annotations

import math

import grpc.aio

from twostroke.base.errors import InvalidRequest
from twostroke.base.ids import PinId
from twostroke.kv_cache.pins.pin_table import Pin, pin_id_of
from twostroke.rpc.pins import pin_from_message
from twostroke.rpc.v1 import pins_pb2, pins_pb2_grpc
from twostroke.worker.branches import BranchHost
from twostroke.worker.pins.keeper import PinKeeper, PinState

Context = grpc.aio.ServicerContext[object, object]


class PinsService(pins_pb2_grpc.PinsServicer):
    def __init__(self, host: BranchHost, pins: PinKeeper) -> None:
        self._host = host
        self._pins = pins

    async def Put(  # noqa: N802
        self, request: pins_pb2.PutPinRequest, context: Context
    ) -> pins_pb2.PutPinResponse:
        self._host.validator.check(request.pin.fingerprint, "")
        pin = pin_from_message(request.pin)
        self._check(pin)
        self._pins.put(pin, request.source if request.HasField("source") else None)
        return pins_pb2.PutPinResponse(held=[self._held(self._pins.state(pin))])

    async def Remove(  # noqa: N802
        self, request: pins_pb2.RemovePinRequest, context: Context
    ) -> pins_pb2.RemovePinResponse:
        ids = [PinId(request.pin_id)]
        if not request.pin_id:
            ids = [pin.pin_id for pin in self._pins.table.pins if pin.owner == request.owner]
        return pins_pb2.RemovePinResponse(removed=sum(map(self._pins.remove, ids)))

    async def List(  # noqa: N802
        self, request: pins_pb2.ListPinsRequest, context: Context
    ) -> pins_pb2.ListPinsResponse:
        limits = self._pins.table.limits
        use = pins_pb2.PinUse(
            worker_id=self._host.config.worker_id,
            pages_total=limits.total,
            pages_pinned=self._pins.table.pinned_blocks,
            most_pages=limits.most,
            page_bytes=limits.page_bytes,
            hints=self._pins.table.hints,
        )
        states = self._pins.states(with_hints=request.hints)
        return pins_pb2.ListPinsResponse(held=map(self._held, states), uses=[use])

    def _held(self, state: PinState) -> pins_pb2.HeldPin:
        pin, blocks = state.pin, len(state.pin.block_hashes)
        is_ready = not state.missing
        name = pins_pb2.PIN_STATE_FAILED if state.problem else pins_pb2.PIN_STATE_COMPUTING
        return pins_pb2.HeldPin(
            worker_id=self._host.config.worker_id,
            pin_id=pin.pin_id,
            owner=pin.owner,
            tenant=pin.tenant,
            text=pin.text,
            state=pins_pb2.PIN_STATE_READY if is_ready else name,
            blocks=blocks,
            ready_blocks=blocks - state.missing,
            bytes=blocks * self._host.facts.page_bytes,
            hits=state.hits,
            saved_s=state.saved_s,
            expires_s=pin.expires_s,
            problem="" if is_ready else state.problem,
            is_hint=pin.is_hint,
        )

    def _check(self, pin: Pin) -> None:
        """Refuses what is not a pin of this worker's model. Raises InvalidRequest, naming the field."""
        facts, blocks = self._host.facts, len(pin.block_hashes)
        if not blocks:
            raise InvalidRequest("the pin has no block", field="block_hashes")
        if len(set(pin.block_hashes)) < blocks:
            raise InvalidRequest("block_hashes has a block twice", field="block_hashes")
        if len(pin.tokens) != blocks * facts.block_size:
            raise InvalidRequest(
                f"{len(pin.tokens)} tokens do not fill {blocks} blocks of {facts.block_size}", field="tokens"
            )
        if len(pin.tokens) > facts.max_model_len:
            raise InvalidRequest(
                f"the pin has {len(pin.tokens)} tokens; the model serves {facts.max_model_len}", field="tokens"
            )
        if max(pin.tokens) >= facts.vocab_size:
            raise InvalidRequest(f"token ids go up to {facts.vocab_size - 1}, got {max(pin.tokens)}", field="tokens")
        if pin.expires_s is not None and not math.isfinite(pin.expires_s):
            raise InvalidRequest(f"expires_s must be finite, got {pin.expires_s}", field="expires_s")
        if not pin.owner:
            raise InvalidRequest("a pin needs an owner", field="owner")
        if pin.pin_id != pin_id_of(pin.owner, pin.tenant, pin.block_hashes[-1]):
            raise InvalidRequest("pin_id is not that of the pin's owner, tenant and blocks", field="pin_id")
