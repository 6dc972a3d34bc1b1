"""The adapters that the fleet serves, by the names that clients call them, as the supervisor says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twostroke.request import AdapterRef
from twostroke.rpc.v1 import adapters_pb2


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    name: str
    ref: AdapterRef
    lora_rank: int
    parameters: int
    loaded_s: float
    """When it was loaded, in Unix seconds."""

    @classmethod
    def of(cls, message: adapters_pb2.NamedAdapter) -> ServedAdapter:
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


Adapters = Mapping[str, ServedAdapter]


def adapters_of(messages: Iterable[adapters_pb2.NamedAdapter]) -> Adapters:
    return {message.name: ServedAdapter.of(message) for message in messages}
