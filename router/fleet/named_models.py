"""The models that the fleet serves beside its own, by the names that clients call them: adapters to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twostroke.kv_cache.block import derived_salt
from twostroke.request import WeightsRef
from twostroke.rpc.v1 import adapters_pb2, fleet_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class NamedModel:
    """An adapter as the supervisor knows it."""

    name: str
    ref: WeightsRef
    lora_rank: int
    parameters: int
    loaded_s: float
    """When it was loaded, in Unix seconds."""

    def salted(self, salt: bytes) -> bytes:
        """Returns a salt with which no other model has blocks in common."""
        return adapter_salt(salt, self.ref.digest)

    @classmethod
    def of(cls, message: adapters_pb2.NamedAdapter) -> NamedModel:
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
    """Returns the salt of blocks that an adapter computes: its digest keeps them apart from every other adapter's.

    Not one block of them has the KV of the model alone, so that none may be public.
    """
    return derived_salt(salt, b"adapter", adapter)


NamedModels = Mapping[str, NamedModel]


def named_models_of(view: fleet_pb2.FleetView) -> NamedModels:
    return {message.name: NamedModel.of(message) for message in view.adapters}
