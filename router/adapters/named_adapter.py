"""An adapter as the supervisor knows it: a `NamedModel` of the fleet."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from router.fleet.named_models import NamedModels
from twostroke.kv_cache.block import adapter_salt
from twostroke.request import AdapterRef, GenerateRequest
from twostroke.rpc.v1 import adapters_pb2, fleet_pb2
from twostroke.rpc.v1.control_pb2 import Load


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    name: str
    ref: AdapterRef
    lora_rank: int
    parameters: int
    loaded_s: float

    @property
    def folder(self) -> str:
        return self.ref.path

    def salted(self, salt: bytes) -> bytes:
        return adapter_salt(salt, self.ref.digest)

    def of_it(self, request: GenerateRequest) -> GenerateRequest:
        return dataclasses.replace(request, salt=self.salted(request.salt), public_blocks=0, adapter=self.ref)

    def load_s(self, load: Load) -> float:
        """A worker that has not measured any load costs nothing."""
        return 0.0 if self.ref.digest in load.adapters else load.adapter_load_s

    @classmethod
    def of(cls, message: adapters_pb2.NamedAdapter) -> NamedAdapter:
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


def named_adapters(view: fleet_pb2.FleetView) -> NamedModels:
    return {message.name: NamedAdapter.of(message) for message in view.adapters}
