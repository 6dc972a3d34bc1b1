"""The models that the fleet serves beside its own, by the names that clients call them: adapters to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twostroke.kv_cache.block import adapter_salt
from twostroke.request import AdapterRef, BlockConditions
from twostroke.rpc.v1 import adapters_pb2, fleet_pb2


@dataclass(frozen=True, slots=True)
class NamedModel:
    """An adapter as the supervisor knows it."""

    name: str
    ref: AdapterRef
    lora_rank: int
    parameters: int
    loaded_s: float
    """When it was loaded, in Unix seconds."""

    def salted(self, salt: bytes) -> bytes:
        """Returns a salt with which no other model has blocks in common."""
        return adapter_salt(salt, self.ref.digest)

    @property
    def conditions(self) -> BlockConditions:
        return BlockConditions(self.ref)

    @classmethod
    def of(cls, message: adapters_pb2.NamedAdapter) -> NamedModel:
        ref = AdapterRef(message.adapter.digest, message.adapter.path)
        return cls(message.name, ref, message.rank, message.parameters, message.loaded_s)

    def to_message(self) -> adapters_pb2.NamedAdapter:
        return adapters_pb2.NamedAdapter(
            name=self.name,
            adapter=adapters_pb2.Adapter(digest=self.ref.digest, path=self.ref.path),
            rank=self.lora_rank,
            parameters=self.parameters,
            loaded_s=self.loaded_s,
        )


NamedModels = Mapping[str, NamedModel]


def named_models_of(view: fleet_pb2.FleetView) -> NamedModels:
    return {message.name: NamedModel.of(message) for message in view.adapters}
