"""An adapter in the supervisor's view: a `NamedModel` of the fleet."""

from __future__ import annotations

from dataclasses import dataclass

from router.fleet.named_models import NamedModels
from twostroke.kv_cache.block import derived_salt
from twostroke.request import WeightsRef
from twostroke.rpc.v1 import adapters_pb2, fleet_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    name: str
    ref: WeightsRef
    lora_rank: int
    parameters: int
    loaded_s: float

    def salted(self, salt: bytes) -> bytes:
        return adapter_salt(salt, self.ref.digest)

    @classmethod
    def of(cls, message: adapters_pb2.NamedAdapter) -> NamedAdapter:
        ref = WeightsRef(message.adapter.digest, message.adapter.path)
        return cls(message.name, ref, message.lora_rank, message.parameters, message.loaded_s)

    def to_message(self) -> adapters_pb2.NamedAdapter:
        return adapters_pb2.NamedAdapter(
            name=self.name,
            adapter=worker_pb2.Weights(digest=self.ref.digest, path=self.ref.path),
            lora_rank=self.lora_rank,
            parameters=self.parameters,
            loaded_s=self.loaded_s,
        )


def adapter_salt(salt: bytes, adapter: bytes) -> bytes:
    """Returns the salt of blocks with an adapter's KV. Its digest separates them from those of all other adapters.

    The base model has other KV for the same tokens, so these blocks are never public.
    """
    return derived_salt(salt, b"adapter", adapter)


def named_adapters(view: fleet_pb2.FleetView) -> NamedModels:
    return {message.name: NamedAdapter.of(message) for message in view.adapters}
